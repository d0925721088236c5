#include "../math/cascade.h"

#include "launch.cuh"

namespace texvlm::cuda {

TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, ScoreCells);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, RankScores);
TEXVLM_FOR_TEXEL_TYPES(TEXVLM_QUERIES, ScatterTopK);

}  // namespace texvlm::cuda
