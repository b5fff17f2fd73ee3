"""A plug-in of specbench: a rule, a drafter, a preset of both, a metric with a column, and a suite."""
