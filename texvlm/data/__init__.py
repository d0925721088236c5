"""Many pictures: what feeds a training loop, and what a folder of them keeps. `texvlm.data` is imported when it is asked for."""

from texvlm.data.decoding import DECODERS, decode
from texvlm.data.indexing import Indexed, index
from texvlm.data.selecting import Select, collate, initialise_worker

__all__ = ["DECODERS", "Indexed", "Select", "collate", "decode", "index", "initialise_worker"]
