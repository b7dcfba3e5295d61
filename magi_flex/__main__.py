import sys

from magi_flex.cli import main

sys.exit(main())
