"""`python -m torch_fp4kv` is the command `torch-fp4kv`."""

import sys

from .cli import main

sys.exit(main())
