"""`python -m forge_serve` is `forge-jax`."""

import sys

from forge_serve.cli.main import main

sys.exit(main())
