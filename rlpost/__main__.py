"""`python -m rlpost`."""

from rlpost.cli.main import main

if __name__ == "__main__":
    main()
