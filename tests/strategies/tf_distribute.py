"""The left sides of strategies.md's first table, run in TensorFlow: what `test_tf_distribute.py` compares with.

By hand, with a Python that has TensorFlow and nothing of ours:

    python tests/strategies/tf_distribute.py > tests/strategies/tf_distribute.json

Of a case `each` is what each of two replicas has; what is outside of replicas is a value. Of errors only that there
is one: the two word them differently.
"""

import json
import sys
from typing import Any

X = [[(7 * i + 3 * j) % 11 / 5 - 1 for j in range(3)] for i in range(24)]
Y = [[sum(v * v for v in row)] for row in X]
W = [[0.1], [-0.2], [0.3]]


def main() -> dict[str, Any]:
    import tensorflow as tf  # type: ignore[import-not-found]

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    api = tf.distribute
    mirrored, one = api.MirroredStrategy(["/cpu:0", "/cpu:1"]), api.OneDeviceStrategy("/cpu:0")
    SUM, MEAN = api.ReduceOp.SUM, api.ReduceOp.MEAN
    make = mirrored.experimental_distribute_values_from_function

    def matrix():
        return make(lambda ctx: tf.constant([[1.0, 2, 3], [4, 5, 6]]) * (ctx.replica_id_in_sync_group + 1))

    def rows():
        number = "replica_id_in_sync_group"
        return make(lambda ctx: tf.fill([getattr(ctx, number) + 1, 2], getattr(ctx, number) + 1.0))

    def integers():
        return make(lambda ctx: tf.constant([ctx.replica_id_in_sync_group + 1, 4]))

    def number():
        return make(lambda ctx: tf.constant(ctx.replica_id_in_sync_group + 1.0))

    def in_replicas(function, *values):
        return mirrored.run(lambda *given: function(api.get_replica_context(), *given), args=values)

    def batches(strategy, size, batch_size, **options):
        data = tf.data.Dataset.range(size).batch(batch_size, **options)
        return [
            list(strategy.experimental_local_results(one)) for one in strategy.experimental_distribute_dataset(data)
        ]

    def read(context):
        data = tf.data.Dataset.range(8).batch(context.get_per_replica_batch_size(4))
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)

    def entering(outer, inner):
        with outer.scope(), inner.scope():
            return True

    def train(strategy, size):
        with strategy.scope():
            weight, bias = tf.Variable(W), tf.Variable([0.0])
        data = tf.data.Dataset.from_tensor_slices((tf.constant(X[:size]), tf.constant(Y[:size]))).batch(8)
        losses = []

        @tf.function
        def step(inputs, targets):
            with tf.GradientTape() as tape:
                each = tf.reduce_sum(tf.square(inputs @ weight + bias - targets), 1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=8)
            gradients = api.get_replica_context().all_reduce(SUM, tape.gradient(loss, [weight, bias]))
            weight.assign_sub(0.05 * gradients[0])
            bias.assign_sub(0.05 * gradients[1])
            return loss

        for _ in range(2):
            for batch in strategy.experimental_distribute_dataset(data):
                losses.append(strategy.reduce(SUM, strategy.run(step, args=batch), axis=None))
        return [losses, weight, bias]

    def fit():
        with mirrored.scope():
            model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
            model.set_weights([tf.constant(W), tf.zeros(1)])
            model.compile(optimizer=tf.keras.optimizers.SGD(0.05), loss="mse")
        model.fit(tf.constant(X), tf.constant(Y), batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    cases = {
        "no scope": lambda: [
            api.has_strategy(),
            api.get_strategy().num_replicas_in_sync,
            api.get_strategy().reduce(MEAN, tf.constant([3, 4]), axis=0),
            api.get_replica_context().replica_id_in_sync_group,
            api.get_replica_context().all_reduce(SUM, tf.constant(2.0)),
        ],
        "replicas": lambda: mirrored.num_replicas_in_sync,
        "values from function": number,
        **{
            f"reduce {what.__name__} {op.name} {axis}": lambda what=what, op=op, axis=axis: mirrored.reduce(
                op, what(), axis=axis
            )
            for what in (matrix, rows, integers, number)
            for op in (SUM, MEAN)
            for axis in (None, 0, 1, -1, (0, 1))
        },
        "reduce by name": lambda: [mirrored.reduce(op, number(), axis=None) for op in ("SUM", "mean")],
        "reduce nested": lambda: mirrored.reduce(SUM, {"a": number(), "b": [matrix()]}, axis=None),
        "reduce max": lambda: mirrored.reduce("MAX", number(), axis=None),
        "gather 0": lambda: mirrored.gather(matrix(), axis=0),
        "gather 1": lambda: mirrored.gather(matrix(), axis=1),
        "gather 2": lambda: mirrored.gather(matrix(), axis=2),
        "gather rows": lambda: mirrored.gather(rows(), axis=0),
        "gather number": lambda: mirrored.gather(number(), axis=0),
        "local results": lambda: len(mirrored.experimental_local_results(number())),
        "run": lambda: mirrored.run(lambda x, k: x * k, args=(number(),), kwargs={"k": 10.0}),
        "run list": lambda: mirrored.run(lambda x: x, args=[number()]),
        "run args=(x)": lambda: mirrored.run(lambda x: x, args=number()),
        "run raises": lambda: mirrored.run(lambda: 1 / 0),
        "context": lambda: in_replicas(lambda ctx: [ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync]),
        "context strategy": lambda: in_replicas(
            lambda ctx: [ctx.strategy is mirrored, api.get_strategy() is mirrored, api.has_strategy()]
        ),
        "context all_reduce": lambda: in_replicas(lambda ctx, x: ctx.all_reduce(SUM, x), matrix()),
        "context all_reduce mean": lambda: in_replicas(
            lambda ctx, x: ctx.all_reduce(MEAN, [x, {"a": 2 * x}]), number()
        ),
        "context all_gather": lambda: in_replicas(lambda ctx, x: ctx.all_gather(x, axis=0), rows()),
        "context merge_call": lambda: in_replicas(
            lambda ctx, x: ctx.merge_call(
                lambda strategy, value, k: strategy.reduce(SUM, value, axis=None) * k, args=(x,), kwargs={"k": 2.0}
            ),
            number(),
        ),
        "scope in its own": lambda: entering(mirrored, mirrored),
        "scope in another": lambda: entering(mirrored, one),
        "batches 8 by 4": lambda: batches(mirrored, 8, 4),
        "batches 10 by 4": lambda: batches(mirrored, 10, 4),
        "batches 9 by 4": lambda: batches(mirrored, 9, 4),
        "batches 9 by 4 drop": lambda: batches(mirrored, 9, 4, drop_remainder=True),
        "batches 10 by 5": lambda: batches(mirrored, 10, 5),
        "batches 3 by 4": lambda: batches(mirrored, 3, 4),
        "batches from function": lambda: [
            list(mirrored.experimental_local_results(one)) for one in mirrored.distribute_datasets_from_function(read)
        ],
        "batch of 5 for 2": lambda: mirrored.distribute_datasets_from_function(
            lambda context: context.get_per_replica_batch_size(5)
        ),
        "one device": lambda: [
            one.num_replicas_in_sync,
            one.run(lambda x: x + 1, args=(1,)),
            one.reduce(SUM, tf.constant(3.0), axis=None),
            one.reduce(MEAN, tf.constant([3, 4]), axis=0),
            one.experimental_local_results(5),
            one.gather(tf.constant([1, 2]), axis=0),
        ],
        "device oven": lambda: api.MirroredStrategy(["oven"]),
        "train": lambda: train(mirrored, 24),
        "train alone": lambda: train(one, 24),
        "train 20": lambda: train(mirrored, 20),
        "fit": fit,
    }

    def plain(value):
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, api.DistributedValues) and not isinstance(value, tf.Variable):
            return {"each": plain(mirrored.experimental_local_results(value))}
        return value.numpy().tolist() if hasattr(value, "numpy") else getattr(value, "tolist", lambda: value)()

    def result(case):
        try:
            return plain(case())
        except Exception as error:
            print(type(error).__name__, str(error)[:100], file=sys.stderr)
            return {"error": True}

    return {"tensorflow": tf.__version__, "results": {name: result(case) for name, case in cases.items()}}


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
