"""The p-values and distances that determine a verdict."""

#: An exact total variation above it refutes. The exact methods reached 5.2e-7 at a node, in float32, and 3e-8 for whole
#: sequences; a residual (p - 0.999 q)+ reaches 2.7e-4 and more (`audit --all`, 2026-11-28).
ROUNDING = 2e-6

#: A p-value below it is "not lossless". `--all` tests some 360 true hypotheses, so 1e-5 rejects one of them by chance
#: for 0.4 % of all seeds. Bonferroni is conservative here, since prefixes contain each other, and sums of tokens
#: contain the tokens. The test still finds a relevant bias: a total variation of 0.02 in a first token of equally
#: likely values gives p near 1e-68 at 200,000 samples, and a Kolmogorov-Smirnov distance of 0.01 gives p near 1e-7.
LEVEL = 1e-5

#: A p-value below it, but not below LEVEL, decides nothing; then FURTHER times as many new sequences decide. The first
#: sequences refute a lossless method with a probability of at most LEVEL. The new ones do so, independently, with at
#: most DOUBT * LEVEL. Together this is at most 1.001 LEVEL. The same holds at every other level.
DOUBT, FURTHER = 1e-3, 10

#: The default of audit.margin: the default samples resolve it on every model (their limit is 0.04 at worst).
MARGIN = 0.05
