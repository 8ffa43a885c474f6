"""Local workers that may be lost: the run goes on, with the weights it would have had.

The process that started the workers supervises them. It holds the folder of stores that they meet
by and a pipe to each; none of the workers is needed for the others to find each other again.

A *world* is the workers that train together. One goes after another:

    worker -> supervisor   ready      it hears signals
                           join       it is in no world, and holds the state after so many images,
                                      or nothing; it may ask for another number of workers
                           meets      it is about to be connected with the others, or once more
                           met        it is connected with the others of its world
                           begun      the run's folder is this run's: a restart resumes from it
                           pulse      it lives
                           felt       a sum failed, perhaps of a lost worker
                           result, mistake, explained, failure, interrupted: how its work ended
    supervisor -> worker   world      rank, size and store of the next world
                           lost       a member of this world is gone: come out of it, and join
                           leave      it is not needed any more
                           heard      the answer to felt; lost, if one is, comes soon after

When a member ends without a word, the supervisor starts another in its place and tells the rest;
one that gives no pulse for long, or lets the others wait too long, is ended first. Each of the rest
closes its connections to the others, so that whoever waits for one of them waits no longer, keeps
the state that it has (which is always that after a whole step, for a sum fails before its update
begins), and joins. When all have joined, the one that is furthest becomes the first of the next
world, and all others, newcomers or not, copy its state. Where nobody holds one, all begin from the
newest checkpoint.
"""
