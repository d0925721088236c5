#include "scatter.cu"
