"""A plug-in of specbench: a rule, a drafter, a preset of both, and a metric with a column of its own."""
