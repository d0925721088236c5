"""`python -m texvlm`: doctor, view, select, bench."""

from texvlm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
