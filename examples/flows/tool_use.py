"""Tools over many turns: the environment is an argument of the rollout, and what it says does not train."""

import ast
import operator

import flowrl as fr
from flowrl_operators import advantages, environments, losses, rewards

FACTS = {"peru": "The capital of Peru is Lima.", "kenya": "The capital of Kenya is Nairobi."}
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def search(query):
    """Facts that mention a word of the query."""
    return " ".join(fact for word, fact in FACTS.items() if word in query.lower()) or "nothing found"


def python(expression):
    """The value of an arithmetic expression; nothing else of Python is run."""

    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return ARITHMETIC[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"only numbers and + - * / are allowed, not {ast.unparse(node)!r}")

    return value(ast.parse(expression, mode="eval").body)


@fr.flow
def tool_use(prompts, policy):
    rows = fr.rollout(policy, prompts, n=8, environment=environments.tools([search, python]), max_turns=6)
    rows = advantages.group_norm(rewards.exact(rows) + 0.1 * rewards.format(rows))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))
