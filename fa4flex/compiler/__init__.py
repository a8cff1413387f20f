"""From a generated module to a function that launches: entry points, compilation, files that are kept."""
