"""`python -m truegraft.cli`, for where the `truegraft` script is not on the path."""

from truegraft.cli import main

main()
