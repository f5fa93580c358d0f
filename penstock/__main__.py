"""`python -m penstock` is the `penstock` command."""

from penstock.interpreter import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()
    from penstock.cli import main

    main()
