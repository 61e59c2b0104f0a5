"""Entry point of `python -m assay`, which is the `assay` command."""

from assay.cli import main

if __name__ == "__main__":
    main()
