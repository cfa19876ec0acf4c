"""Pictures of runs: what a run's folder holds, as a page. Reads files; runs nothing.

source      what is read, and from where: any object that reads like a run's folder
curves      metrics as small charts
responses   recorded rows in compressed blocks, a few hundred responses each
page        the page of a run; compare: runs over each other
serve       the page while its run goes on, for this machine alone
"""
