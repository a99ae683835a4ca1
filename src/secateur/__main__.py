"""`python -m secateur` is the command `secateur`."""

from secateur.cli.app import main

main()
