"""``python -m chaz`` is the command ``chaz``."""

from chaz.cli import main

if __name__ == "__main__":
    main()
