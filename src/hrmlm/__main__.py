"""`python -m hrmlm`."""

from hrmlm.cli import main

main()
