"""`python -m texvlm`, the same as the command `texvlm`: see texvlm.cli."""

from texvlm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
