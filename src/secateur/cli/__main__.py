"""`python -m secateur.cli` is the command `secateur`."""

from secateur.cli.app import main

main()
