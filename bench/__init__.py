"""dgr-bench: certificates and benchmarks of dgr, made with its public names only."""

# General layout.
#
#   cli         one subcommand per module below
#   certify     the long-context certificate; profiles (what is locked), subjects (who runs a prompt), measures, refusals
#               (what must fail), checks (raw figures into verdicts), mutants (what each check must catch), verify
#   frontier    speed at growing contexts        overhead    dgr against upstream's llama-bench       hops    cost of a hop
#   drill       lost, cut, stalled, slow stages  compare     two results, part by part                real    the real model
#   results     the schema of a result, and the journal that an interrupted run resumes from
#   upstream    llama-bench: its binary and its JSON; echo: the far side of a hop; spreads: medians, quartiles, goals
#   environment what a result carries of its machine
#   reports     Markdown; plots: SVG and PNG
