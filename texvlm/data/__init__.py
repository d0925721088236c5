"""Many pictures: what feeds a training loop. `texvlm.data` is imported when it is asked for."""

from texvlm.data.decoding import DECODERS, decode
from texvlm.data.selecting import Select, collate, initialise_worker

__all__ = ["DECODERS", "Select", "collate", "decode", "initialise_worker"]
