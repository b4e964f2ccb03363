//! A configuration says the same after it was written as JSON and read back, whatever its values.

// tier: test

#![expect(clippy::unwrap_used, reason = "the registry has what it describes")]

mod numbered;

use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    AdmissionConfig, Dtype, EvictionConfig, EvictionPolicy, InitializerConfig, LocalStore, NanPolicy,
    OptimizerConfig, Serial, TableConfig, optimizers,
};
use serde_json::{Value, json};

/// Positive values of every magnitude that single precision has.
fn positive() -> impl Strategy<Value = f64> {
    (-37.0..37.0f64).prop_map(|exponent| 10f64.powf(exponent))
}

fn initializer() -> impl Strategy<Value = InitializerConfig> {
    prop_oneof![
        Just(InitializerConfig::Zeros {}),
        positive().prop_map(|value| InitializerConfig::Constant { value }),
        positive().prop_map(|b| InitializerConfig::Uniform { a: -b, b }),
        (positive(), positive()).prop_map(|(mean, std)| InitializerConfig::Normal { mean, std }),
        positive().prop_map(|std| InitializerConfig::TruncatedNormal {
            mean: 0.0,
            std,
            a: None,
            b: Some(std)
        }),
        positive().prop_map(|gain| InitializerConfig::XavierUniform { gain }),
    ]
}

/// A value of every kind that an option may have.
type Draw = (f64, [f64; 2], bool);

fn value_of(option: &Value, &(positive, shares, is_on): &Draw) -> Value {
    match &option["default"] {
        Value::Bool(_) => is_on.into(),
        Value::String(_) => option["choices"][usize::from(is_on)].clone(),
        Value::Array(_) => shares.to_vec().into(),
        _ if option["range"] == "share" => shares[0].into(),
        _ => positive.into(),
    }
}

/// Every optimizer with any values of its options, but for those that do not go together.
fn optimizer() -> impl Strategy<Value = OptimizerConfig> {
    const MAX_OPTIONS: usize = 8;
    let values = prop::collection::vec((positive(), [0.0..1.0f64, 0.0..1.0f64], any::<bool>()), MAX_OPTIONS);
    (prop::sample::select(optimizers()), values).prop_filter_map(
        "options that go together",
        |(rule, draws)| {
            let options = rule["options"].as_array().unwrap();
            assert!(options.len() <= MAX_OPTIONS, "{rule}");
            let named = options.iter().zip(&draws);
            let named =
                named.map(|(option, draw)| (option["name"].as_str().unwrap(), value_of(option, draw)));
            let mut optimizer = json!({"kind": rule["kind"]});
            named.for_each(|(name, value)| optimizer[name] = value);
            match TableConfig::from_json(1, &json!({ "optimizer": optimizer }).to_string()) {
                Ok(config) => Some(config.optimizer),
                Err(refused) => {
                    assert!(refused.to_string().contains(" goes with "), "{refused}");
                    None
                }
            }
        },
    )
}

fn admission() -> impl Strategy<Value = AdmissionConfig> {
    let halving = || prop::option::of(1..=u64::MAX);
    // What tables of any dim here take for them is below the limit.
    let shared = || prop::option::of(1..=1u32 << 24);
    let count = (1..=u32::MAX, halving(), shared());
    let sketch = (1..=u32::MAX, 1e-3..0.9f64, 1e-9..0.9f64, halving(), shared());
    prop_oneof![
        count.prop_map(|(threshold, halve_every, shared_rows)| AdmissionConfig::Count {
            threshold,
            halve_every,
            shared_rows
        }),
        sketch.prop_map(|(threshold, epsilon, delta, halve_every, shared_rows)| AdmissionConfig::Sketch {
            threshold,
            epsilon,
            delta,
            halve_every,
            shared_rows
        }),
        (0.0..=1.0f64, shared())
            .prop_map(|(probability, shared_rows)| AdmissionConfig::Probability { probability, shared_rows }),
    ]
}

fn eviction() -> impl Strategy<Value = EvictionConfig> {
    let capacity = prop::option::of((
        1..=u64::MAX,
        prop::sample::select(&[EvictionPolicy::Lru, EvictionPolicy::Lfu][..]),
    ));
    let steps = (10..=u64::MAX, prop::option::of(1..10u64));
    (1..=u64::MAX, prop::option::of(positive()), capacity, steps).prop_map(
        |(ttl, min_norm, capacity, (interval, delay))| {
            let policy = capacity.map_or_else(EvictionPolicy::default, |(_, policy)| policy);
            let capacity = capacity.map(|(capacity, _)| capacity);
            EvictionConfig { ttl: Some(ttl), min_norm, capacity, policy, keep: vec![], interval, delay }
        },
    )
}

fn config() -> impl Strategy<Value = TableConfig> {
    let policy = prop::sample::select(&[NanPolicy::Error, NanPolicy::Skip, NanPolicy::Allow][..]);
    let sizes = (1..1000usize, 1..=i64::MAX as u64, any::<u64>(), 1..80_000usize);
    let life = (prop::option::of(admission()), prop::option::of(eviction()));
    (sizes, initializer(), optimizer(), policy, life).prop_map(
        |(sizes, initializer, optimizer, nan_policy, life)| {
            let (admission, eviction) = life;
            let (dim, bound, seed, block_size) = sizes;
            let num_embeddings = Some(bound);
            let dtype = Dtype::Float32;
            let config =
                TableConfig { dim, num_embeddings, dtype, seed, block_size, ..TableConfig::new(dim) };
            let max_grad_norm = seed.is_multiple_of(2).then_some(0.5);
            let catches_up = json!(optimizer)["catch_up"] == true;
            let ema_decay = (seed.is_multiple_of(3) && !catches_up).then_some(0.75);
            let admission = if catches_up { None } else { admission };
            let config =
                TableConfig { memory_limit: Some(bound | 1 << 50), max_grad_norm, ema_decay, ..config };
            TableConfig { initializer, optimizer, nan_policy, admission, eviction, ..config }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_table_opens_again_with_what_it_was_described_as(config in config()) {
        let store = LocalStore::new(Box::new(Serial));
        let table = store.open_numbered("t", &config).unwrap();
        let described = store.describe(table).unwrap().config.to_json().unwrap();
        let read_back = TableConfig::from_json(config.dim, &described).unwrap();
        prop_assert_eq!(&read_back, &config);
        prop_assert_eq!(store.open_numbered("t", &read_back), Ok(table));
    }
}
