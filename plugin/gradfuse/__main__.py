"""`python -m gradfuse` is the command `gradfuse`."""

from gradfuse.cli import main

if __name__ == "__main__":
    main()
