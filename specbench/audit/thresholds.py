"""From which p-values and distances a verdict follows."""

#: A p-value below it is "not lossless". `--all` tests some 200 true hypotheses, so 1e-5 rejects one of them by chance
#: in 0.2 % of all seeds. Bonferroni is conservative here, since prefixes contain each other, and sums of tokens contain
#: the tokens. The test still finds a relevant bias: a total variation of 0.02 in a first token of equally likely values
#: gives p near 1e-68 at 200,000 samples, and a Kolmogorov-Smirnov distance of 0.01 gives p near 1e-7.
LEVEL = 1e-5

#: A p-value below it, but not below LEVEL, decides nothing: FURTHER times as many sequences do, all of them new. A
#: lossless method is refuted with a probability of at most LEVEL by the first ones, and, independently, of at most
#: DOUBT * LEVEL by the new ones: of 1.001 LEVEL in all. The same holds at every other level.
DOUBT, FURTHER = 1e-3, 10

#: audit.margin, if it is not given: what the default samples resolve of every model (a limit of 0.04 at the worst).
MARGIN = 0.05
