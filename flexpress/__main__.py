"""python -m flexpress: see flexpress/cli.py."""

import sys

from flexpress.cli import main

sys.exit(main())
