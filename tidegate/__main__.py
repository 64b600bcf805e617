"""`python -m tidegate` is the command `tidegate`, for where scripts are not on the path."""

from tidegate.cli import main

if __name__ == "__main__":
    main()
