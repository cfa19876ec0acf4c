"""What should be computed: the language, the graph, its checks and its text form."""
