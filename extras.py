"""The extras add rows to the core's tables. Delete a line here, and its files: the rest runs without.

What isn't named in a row is imported where it is asked for: delete its files alone. These are critic.py
(--algorithm ppo, safe_rlhf), training/ptx.py (ptx_data), images/ with training/vision.py (a model that sees).
"""

import apart  # noqa: F401  PLACEMENTS: models and engines on ranks of their own, --ahead
import commands.memory  # noqa: F401  CHECKS: a run that takes too much memory doesn't start; with dry_run.py
import demo.task  # noqa: F401  FORMATS: the demo's judges
import fused  # noqa: F401  MODES, MOVES: --mode fused; with scheduling/fusion.py
import scheduling.fused_pipelines  # noqa: F401  SCHEDULES: --schedule fused
from scheduling import rebalance  # noqa: F401  MOVES: --rebalance
