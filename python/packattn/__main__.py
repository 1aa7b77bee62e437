"""`python -m packattn` is the same as the `packattn` command."""

from packattn.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
