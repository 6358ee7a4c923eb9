"""python -m flexpress: see flexpress/commands/cli.py."""

import sys

from flexpress.commands.cli import main

sys.exit(main())
