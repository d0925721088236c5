"""All benchmarks, one process each: python -m benchmarks [names] [--quick] [--json FOLDER] [--threads N]."""

import sys

from texvlm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
