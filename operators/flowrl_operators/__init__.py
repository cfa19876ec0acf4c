"""Operators for FlowRL: advantages, losses, rewards, filters, environments, evaluation.

    from flowrl_operators import advantages, losses, rewards

Importing this imports none of them; each is a module of its own.
"""

MODULES = ("advantages", "environments", "evaluate", "filters", "losses", "rewards")
"""Modules that hold operators; what lists a pack's operators imports these."""
