"""Entry point of `python -m forge_serve`, which is the same as `forge-jax`."""

import sys

from forge_serve.cli.main import main

sys.exit(main())
