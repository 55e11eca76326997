"""The engine: data model, component contract, graph, lifecycle, queue and retry, command line."""
