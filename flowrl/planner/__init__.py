"""How a flow will be computed: where each model stands, in which layout, what moves, and in which order.

planning     `plan`: the whole way from a flow to its plan
shapes       the shape of a model from its name, folder or config
report       what a search looked at
workload     how many prompts, and how long prompts and responses are
workload_text  the same as people write it: lengths as text, a TOML file
offered      whether a placement that is asked for can be at all
roles        the models of a graph, and what each does in an iteration
options      the ways to run a role on a mesh
cells        sets of roles that share a mesh: what fits its memory
orders       the shortest order of an iteration's calls
handover     seconds of new weights on their way to an engine
problem      what is placed, and what a placement is
search       the best placement, by branch and bound
relax        when nothing fits: why, and what would
lower        from a placement to a plan: the passes in `passes`, in order
draft        what these passes take and give
rows         which columns each node reads, who made them, how many bytes they are
holds        what a role holds, by category, and which state of it may leave the devices
parking      the gaps between uses of that state, and what fits the memory
moving       how it leaves and comes back
bound        seconds that no plan goes below, whatever is moved when
tasks        what the simulator runs
simulate     seconds of a set of tasks
usage        memory of devices and hosts over time
views        what a plan can be shown as
steps        the plan: steps on meshes, in a file
table        the same as a table
figures      a plan's figures: what is busiest, what each step holds
explain      why a plan is so: what the next best choices would cost
diff         what differs between two plans
audit        what a layout makes of a model, and what is not really sharded
boxes        parts of tensors
reshard      what moves when weights change their layout, exactly
"""
