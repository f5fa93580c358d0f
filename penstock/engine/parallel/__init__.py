"""One model on several devices: tensor parallel within a layer, pipeline parallel between layers.

Parallelism is applied onto the model from outside. A rank sees a checkpoint and a configuration that are already
smaller (`shards`, `layout`), so the decoder it builds is an ordinary one; the sums between ranks sit in its linears
(`linears`) and the way from stage to stage in one class (`decoder`). Rank 0 is the engine: it schedules, samples and
talks to gateways. The others (`rank`) are processes that it starts (`launch`), told what to do in one message per
step (`channel`). With one device nothing of this is imported.
"""
