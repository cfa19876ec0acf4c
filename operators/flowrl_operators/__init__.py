"""Operators for FlowRL: advantages, losses, rewards, filters, evaluation."""
