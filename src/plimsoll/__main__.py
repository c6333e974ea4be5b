"""``python -m plimsoll`` is the ``plimsoll`` command."""

from plimsoll.cli.main import main

if __name__ == "__main__":
    main()
