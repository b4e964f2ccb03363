//! A configuration says the same after it was written as JSON and read back, whatever its values.

// tier: test

mod numbered;

use numbered::Numbered;
use proptest::prelude::*;
use recstore::{
    AdmissionConfig, BiasCorrection, Convention, Dtype, EvictionConfig, EvictionPolicy, InitializerConfig,
    LocalStore, NanPolicy, OptimizerConfig, Serial, TableConfig,
};

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

fn optimizer() -> impl Strategy<Value = OptimizerConfig> {
    let convention = || prop::sample::select(&[Convention::Recstore, Convention::Torch][..]);
    let betas = || [0.0..1.0f64, 0.0..1.0f64];
    prop_oneof![
        (positive(), positive(), 0.0..1.0f64).prop_map(|(lr, weight_decay, momentum)| OptimizerConfig::Sgd {
            lr,
            weight_decay,
            momentum,
            nesterov: momentum > 0.5,
            catch_up: false,
        }),
        (positive(), [0.0..1.0f64, 0.0..1.0f64], any::<bool>()).prop_map(
            |(eps, [alpha, momentum], centered)| {
                OptimizerConfig::Rmsprop { lr: 0.1, alpha, eps, weight_decay: 0.5, momentum, centered }
            }
        ),
        (positive(), 0.0..1.0f64, positive()).prop_map(|(lr, rho, eps)| OptimizerConfig::Adadelta {
            lr,
            rho,
            eps,
            weight_decay: 0.0
        }),
        (betas(), positive()).prop_map(|(betas, eps)| OptimizerConfig::RowwiseAdam {
            lr: 0.1,
            betas,
            eps,
            weight_decay: 0.0,
            bias_correction: BiasCorrection::Row,
        }),
        (betas(), positive()).prop_map(|(betas, eps)| OptimizerConfig::Lamb {
            lr: 0.1,
            betas,
            eps,
            weight_decay: 0.25,
            bias_correction: BiasCorrection::Table,
        }),
        (positive(), betas(), positive()).prop_map(|(lr, betas, weight_decay)| OptimizerConfig::Lion {
            lr,
            betas,
            weight_decay,
            catch_up: lr > weight_decay,
        }),
        (positive(), positive(), convention()).prop_map(|(lr, eps, convention)| OptimizerConfig::Adagrad {
            lr,
            eps,
            lr_decay: eps,
            weight_decay: 0.0,
            convention
        }),
        (positive(), positive(), convention()).prop_map(|(lr, eps, convention)| {
            OptimizerConfig::RowwiseAdagrad { lr, eps, weight_decay: 0.0, lr_decay: 0.0, convention }
        }),
        (positive(), betas(), positive()).prop_map(|(lr, betas, eps)| OptimizerConfig::Adam {
            lr,
            betas,
            eps,
            weight_decay: 0.0,
            bias_correction: BiasCorrection::Row,
            amsgrad: true,
        }),
        (positive(), betas(), positive()).prop_map(|(lr, betas, eps)| OptimizerConfig::Adamw {
            lr,
            betas,
            eps,
            weight_decay: 0.5,
            bias_correction: BiasCorrection::Table,
            amsgrad: false,
            catch_up: false,
        }),
        (positive(), positive(), positive(), positive())
            .prop_map(|(alpha, beta, l1, l2)| OptimizerConfig::Ftrl { alpha, beta, l1, l2 }),
    ]
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
            let catches_up = matches!(optimizer, OptimizerConfig::Lion { catch_up: true, .. });
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
