"""How a flow will be computed. So far: what moves when weights change their layout (`flowrl.plan.reshard`)."""
