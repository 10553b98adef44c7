"""`python -m moestro`: the command line."""

from moestro.cli.main import main

if __name__ == "__main__":
    main()
