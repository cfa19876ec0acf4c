"""Operators for FlowRL: advantages, losses, rewards, filters, environments, evaluation.

    from flowrl_operators import advantages, losses, rewards

Importing this imports none of them; each is a module of its own.
"""
