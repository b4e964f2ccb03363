//! Rows of 16 and 8 bits: rounded to the nearest where they are written, and up or down by chance, right on average,
//! where a step changes them.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod numbered;
mod pool;
mod rules;

use half::{bf16, f16};
use numbered::Numbered;
use pool::Pool;
use recstore::{
    BagInput, EmbeddingStore, Executor, GradientChunk, LocalStore, PoolingMode, Result, Serial, SimdLevel,
    Step, TableConfig, TableId, TableUpdate,
};
use rules::forms_at;
use serde_json::Value;

/// One element, an odd number of them, one full run of vector lanes and a rest, several full runs.
const DIMS: [usize; 4] = [1, 7, 21, 64];
const DIM: usize = 7;
/// Every element starts at one, and a step takes the gradient away.
const FROM_ONE: &str =
    r#""initializer": {"kind": "constant", "value": 1}, "optimizer": {"kind": "sgd", "lr": 1}"#;

/// The rules, each at a learning rate that leads from zero to one within the steps of a test and stays there.
fn optimizers() -> Vec<String> {
    const MORE: [&str; 3] = [
        r#"{"kind": "adam", "bias_correction": "row"}, "ema_decay": 0.9"#,
        r#"{"kind": "rowwise_adam"}"#,
        r#"{"kind": "ftrl", "alpha": 0.2}"#,
    ];
    let rate = |rule: &Value, form: &Value| match (rule["kind"].as_str(), &form["centered"]) {
        (Some("rmsprop"), Value::Bool(true)) => 0.0002,
        (Some("lamb"), _) => 0.003,
        _ => rule["training"]["lr"].as_f64().unwrap(),
    };
    // Rows that steps change while they leave them alone are of float32 only.
    let forms = forms_at(rate).into_iter().filter(|form| !form.contains("catch_up"));
    forms.chain(MORE.map(str::to_owned)).collect()
}

struct RowType {
    name: &'static str,
    /// Rounds a row to the nearest.
    nearest: fn(&[f32]) -> Vec<f32>,
    /// The distance between the numbers from one to two.
    spacing: f32,
    /// The distance of the next number below one.
    below_one: f32,
    /// The bytes of a row of 64.
    bytes: usize,
}

const ROW_TYPES: [RowType; 4] = [
    RowType {
        name: "bfloat16",
        nearest: |row| row.iter().map(|value| bf16::from_f32(*value).to_f32()).collect(),
        spacing: 1.0 / 128.0,
        below_one: 1.0 / 256.0,
        bytes: 128,
    },
    RowType {
        name: "float16",
        nearest: |row| row.iter().map(|value| f16::from_f32(*value).to_f32()).collect(),
        spacing: 1.0 / 1024.0,
        below_one: 1.0 / 2048.0,
        bytes: 128,
    },
    RowType {
        name: "int8",
        nearest: |row| nearest_codes(row, &(-127..=127).map(f64::from).collect::<Vec<_>>()),
        spacing: 1.0 / 64.0,
        // One is 64 times the scale of a row just below it as well: it would else have the code 128.
        below_one: 1.0 / 64.0,
        bytes: 68,
    },
    RowType {
        name: "float8_e4m3fn",
        nearest: |row| nearest_codes(row, &e4m3()),
        spacing: 1.0 / 8.0,
        below_one: 1.0 / 16.0,
        bytes: 68,
    },
];

/// The numbers of e4m3, in ascending order.
fn e4m3() -> Vec<f64> {
    let normal = (-6..9)
        .flat_map(|exponent| (8..16).map(move |eighths| f64::from(eighths) / 8.0 * 2f64.powi(exponent)));
    let small = (0..8).map(|eighths| f64::from(eighths) / 512.0);
    let magnitudes: Vec<f64> = small.chain(normal).filter(|magnitude| *magnitude <= 448.0).collect();
    let mut numbers: Vec<f64> =
        magnitudes.iter().map(|magnitude| -magnitude).chain(magnitudes.clone()).collect();
    numbers.sort_by(f64::total_cmp);
    numbers
}

/// Rounds a row to codes times the least power of two with which the greatest fits; of two equally near codes to the even
/// one of those that are whole numbers, and the one with an even mantissa of the others.
fn nearest_codes(row: &[f32], codes: &[f64]) -> Vec<f32> {
    let (most, greatest) =
        (row.iter().fold(0f64, |most, value| most.max(f64::from(*value).abs())), codes[codes.len() - 1]);
    let scale = (-126..=121).map(|power| 2f64.powi(power)).find(|scale| most <= greatest * scale).unwrap();
    let nearest = |value: &f32| {
        let sought = f64::from(*value) / scale;
        let above = codes.partition_point(|code| *code < sought).min(codes.len() - 1);
        let below = above.saturating_sub(1);
        let (down, up) = (sought - codes[below], codes[above] - sought);
        // Codes stand in their order, zero in the middle: every other one is even.
        let is_even = (above as i64 - codes.len() as i64 / 2) % 2 == 0;
        let takes_upper = up < down || up == down && is_even;
        ((if takes_upper { codes[above] } else { codes[below] }) * scale) as f32
    };
    row.iter().map(nearest).collect()
}

/// A store with one table.
struct Subject {
    store: LocalStore,
    table: TableId,
    dim: usize,
}

impl Subject {
    /// Opens a table of `dtype`; `more` are further keys of its configuration.
    fn new(dtype: &str, dim: usize, more: &str) -> Self {
        Self::within(LocalStore::new(Box::new(Serial)), dtype, dim, more)
    }

    fn within(store: LocalStore, dtype: &str, dim: usize, more: &str) -> Self {
        let text = format!(r#"{{"dtype": "{dtype}", {more}}}"#);
        let table = store.open_numbered("t", &TableConfig::from_json(dim, &text).unwrap()).unwrap();
        Self { store, table, dim }
    }

    fn read(&self, ids: &[i64]) -> Vec<f32> {
        let mut rows = vec![f32::NAN; ids.len() * self.dim];
        self.store.read(self.table, ids, &mut rows).unwrap();
        rows
    }

    fn write(&self, ids: &[i64], rows: &[f32]) {
        self.store.write(self.table, ids, rows).unwrap();
    }

    fn try_update(&self, ids: &[i64], gradients: &[f32], step: Step) -> Result<()> {
        let chunks = vec![GradientChunk::new(ids, gradients, self.dim)];
        self.store.update(&[TableUpdate { table: self.table, chunks, step }]).map(drop)
    }

    fn update(&self, ids: &[i64], gradients: &[f32]) {
        self.try_update(ids, gradients, Step::Next).unwrap();
    }

    /// Takes a step with the same gradient everywhere.
    fn update_evenly(&self, ids: &[i64], gradient: f32) {
        self.update(ids, &vec![gradient; ids.len() * self.dim]);
    }

    fn insert(&self, ids: &[i64]) -> Vec<f32> {
        let (mut indices, mut rows) = (vec![0; ids.len()], vec![0.0; ids.len() * self.dim]);
        self.store.lookup(self.table, ids, true, &mut indices, &mut rows).unwrap();
        rows
    }

    fn slot(&self, name: &str, ids: &[i64]) -> Vec<f32> {
        self.store.read_slot(self.table, name, ids).unwrap().unwrap()
    }

    /// Returns the sums, means or maxima of bags of three ids, and the positions of the maxima.
    fn pool(&self, ids: &[i64], mode: PoolingMode) -> (Vec<f32>, Vec<i64>) {
        let offsets: Vec<i64> = (0..=ids.len() as i64).step_by(3).collect();
        let elements = (offsets.len() - 1) * self.dim;
        let mut pooled = vec![f32::NAN; elements];
        let mut positions = vec![0; if mode == PoolingMode::Max { elements } else { 0 }];
        let bags = BagInput { ids, offsets: &offsets, mode, per_sample_weights: None, padding_idx: None };
        self.store.bag(&[self.table], bags, &mut pooled, &mut positions, &mut []).unwrap();
        (pooled, positions)
    }

    /// Returns the bits of the rows of `ids` and of their slots.
    fn bits(&self, ids: &[i64]) -> Vec<u32> {
        let mut values = self.read(ids);
        for (slot, _) in self.store.describe(self.table).unwrap().slots {
            values.extend(self.slot(&slot, ids));
        }
        values.iter().map(|value| value.to_bits()).collect()
    }
}

/// Values of both signs without pattern, most of them not representable in 16 bits.
fn values(count: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|j| ((j * 7919 % 2003) as f32 - 1001.0) / 1001.0 * scale).collect()
}

fn mean(values: impl ExactSizeIterator<Item = f32>) -> f64 {
    let count = values.len() as f64;
    values.map(f64::from).sum::<f64>() / count
}

/// Returns how far `values` lie above `others` on average, and how far at most.
fn distance(values: &[f32], others: &[f32]) -> (f64, f32) {
    let differences = values.iter().zip(others).map(|(value, other)| value - other);
    (mean(differences.clone()), differences.map(f32::abs).fold(0.0, f32::max))
}

#[test]
fn a_written_row_reads_back_rounded_to_the_nearest() {
    let ids = [3, i64::MIN, -1, 0, i64::MAX];
    for RowType { name, nearest, .. } in ROW_TYPES {
        for dim in DIMS {
            let subject = Subject::new(name, dim, r#""block_size": 2"#);
            for scale in [1.0, 3e-6, 60_000.0] {
                let rows = values(ids.len() * dim, scale);
                subject.write(&ids, &rows);
                let rounded: Vec<f32> = rows.chunks_exact(dim).flat_map(nearest).collect();
                assert_eq!(subject.read(&ids), rounded, "{name}, dim {dim}");
            }
        }
    }
}

#[test]
fn the_initial_value_is_that_of_float32_rounded_to_the_nearest() {
    let ids: Vec<i64> = (-50..50).collect();
    for RowType { name, nearest, .. } in ROW_TYPES {
        for dim in DIMS {
            let exact = Subject::new("float32", dim, r#""seed": 3"#).read(&ids);
            let rounded: Vec<f32> = exact.chunks_exact(dim).flat_map(nearest).collect();
            assert_eq!(Subject::new(name, dim, r#""seed": 3"#).read(&ids), rounded, "{name}, dim {dim}");
        }
    }
}

#[test]
fn a_row_starts_with_what_its_id_read_as_before() {
    let ids: Vec<i64> = (-50..50).collect();
    for RowType { name, .. } in ROW_TYPES {
        for dim in DIMS {
            let subject = Subject::new(name, dim, r#""optimizer": {"kind": "sgd", "lr": 1}"#);
            let before = subject.read(&ids);
            subject.update_evenly(&ids[..50], 0.0);
            assert_eq!(subject.insert(&ids), before, "{name}, dim {dim}");
            assert_eq!(subject.read(&ids), before, "{name}, dim {dim}");
        }
    }
}

#[test]
fn reading_changes_nothing() {
    for RowType { name, .. } in ROW_TYPES {
        let subject = Subject::new(name, DIM, "\"seed\": 1");
        subject.insert(&[7]);
        let before = subject.store.statistics(subject.table).unwrap();
        subject.read(&(0..1000).collect::<Vec<_>>());
        subject.pool(&(0..999).collect::<Vec<_>>(), PoolingMode::Sum);
        assert_eq!(subject.store.statistics(subject.table), Ok(before), "{name}");
    }
}

#[test]
fn a_step_too_small_for_rounding_to_the_nearest_is_right_on_average() {
    let ids: Vec<i64> = (0..20_000).collect();
    for RowType { name, nearest, spacing, below_one: gap, .. } in ROW_TYPES {
        let gradient = spacing / 16.0;
        assert_eq!(nearest(&[1.0 - gradient]), [1.0]);
        let subject = Subject::new(name, DIM, FROM_ONE);
        subject.update_evenly(&ids, gradient);
        let rows = subject.read(&ids);
        assert!(rows.iter().all(|&value| value == 1.0 || value == 1.0 - gap), "{name}");
        let moved = mean(rows.iter().map(|value| 1.0 - value)) / f64::from(gradient);
        assert!((moved - 1.0).abs() < 0.03, "{name} moved by {moved} of the step");
    }
}

#[test]
fn many_small_steps_add_up() {
    const STEPS: usize = 100;
    let ids: Vec<i64> = (0..200).collect();
    for RowType { name, spacing, .. } in ROW_TYPES {
        let gradient = spacing / 16.0;
        let subject = Subject::new(name, DIM, FROM_ONE);
        (0..STEPS).for_each(|_| subject.update_evenly(&ids, gradient));
        let moved = mean(subject.read(&ids).iter().map(|value| 1.0 - value));
        let share = moved / (STEPS as f64 * f64::from(gradient));
        assert!((share - 1.0).abs() < 0.03, "{name} moved by {share} of the steps");
    }
}

#[test]
fn rounding_depends_on_seed_id_column_and_step_only() {
    let ids: Vec<i64> = (0..500).collect();
    for RowType { name, spacing, .. } in ROW_TYPES {
        let bits = |seed: u64, step: u64| {
            let subject = Subject::new(name, DIM, &format!(r#""seed": {seed}, {FROM_ONE}"#));
            let gradients = vec![spacing / 4.0; ids.len() * DIM];
            subject.try_update(&ids, &gradients, Step::At(step)).unwrap();
            subject.bits(&ids)
        };
        assert_eq!(bits(0, 1), bits(0, 1), "{name}");
        assert_ne!(bits(0, 1), bits(1, 1), "{name}, another seed");
        assert_ne!(bits(0, 1), bits(0, 2), "{name}, another step");
        let rows: Vec<_> = bits(0, 1).chunks_exact(DIM).map(<[u32]>::to_vec).collect();
        assert!(rows.iter().any(|row| row != &rows[0]), "{name}: all ids alike");
        assert!(rows[0].iter().any(|value| value != &rows[0][0]), "{name}: all columns alike");
    }
}

/// Ids all over int64, each about three times: enough for every loop to run on several threads.
fn many_ids() -> Vec<i64> {
    const COUNT: i64 = 6_000;
    let spread = |j: i64| (j * 7919 % (COUNT / 3)).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64);
    (0..COUNT).map(spread).collect()
}

/// Takes three steps of a table in which `inserted` have a row, and returns all its bits.
fn train_many(store: LocalStore, dtype: &str, optimizer: &str, inserted: &[i64]) -> Vec<u32> {
    const DIM: usize = 21;
    let subject =
        Subject::within(store, dtype, DIM, &format!(r#""block_size": 7, "optimizer": {optimizer}"#));
    subject.insert(inserted);
    let ids = many_ids();
    for scale in [1.0, -0.5, 0.25] {
        subject.update(&ids, &values(ids.len() * DIM, scale));
    }
    subject.bits(&ids)
}

#[test]
fn every_thread_count_and_simd_level_gives_the_same_bits() {
    for RowType { name, .. } in ROW_TYPES {
        for optimizer in &optimizers() {
            let on = |executor: Box<dyn Executor>, level| {
                train_many(LocalStore::new(executor).with_simd(level).unwrap(), name, optimizer, &[])
            };
            let expected = on(Box::new(Serial), SimdLevel::Baseline);
            for level in SimdLevel::available() {
                for threads in [1, 2, 8] {
                    let same = on(Pool::new(threads), level) == expected;
                    assert!(same, "{name}, {optimizer}, {level}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn rows_do_not_depend_on_the_order_of_insertion() {
    let ascending = {
        let mut ids = many_ids();
        ids.sort_unstable();
        ids
    };
    let descending: Vec<i64> = ascending.iter().rev().copied().collect();
    for RowType { name, .. } in ROW_TYPES {
        for optimizer in &optimizers() {
            let after =
                |inserted: &[i64]| train_many(LocalStore::new(Box::new(Serial)), name, optimizer, inserted);
            let expected = after(&[]);
            assert!(after(&ascending) == expected, "{name}, {optimizer}, ascending");
            assert!(after(&descending) == expected, "{name}, {optimizer}, backwards");
        }
    }
}

/// Minimizes the squared distance of 100 rows to a target and returns the rows.
fn fit(dtype: &str, dim: usize, optimizer: &str) -> Vec<f32> {
    let ids: Vec<i64> = (0..100).collect();
    let target = values(ids.len() * dim, 0.9);
    let subject = Subject::new(dtype, dim, &format!(r#""optimizer": {optimizer}"#));
    for _ in 0..300 {
        let rows = subject.read(&ids);
        let gradients: Vec<f32> = rows.iter().zip(&target).map(|(w, target)| w - target).collect();
        subject.update(&ids, &gradients);
    }
    subject.read(&ids)
}

#[test]
fn every_optimizer_goes_where_it_goes_with_float32() {
    for dim in DIMS {
        for optimizer in &optimizers() {
            let exact = fit("float32", dim, optimizer);
            for RowType { name, spacing, .. } in ROW_TYPES {
                let (above, most) = distance(&fit(name, dim, optimizer), &exact);
                let what = format!("{name}, dim {dim}, {optimizer}: {above} above, {most} at most");
                assert!(above.abs() < f64::from(spacing) / 4.0 && most < 10.0 * spacing, "{what}");
            }
        }
    }
}

#[test]
fn state_is_kept_in_single_precision() {
    for RowType { name, .. } in ROW_TYPES {
        let subject = Subject::new(name, DIM, r#""optimizer": {"kind": "adagrad"}"#);
        subject.update_evenly(&[5], 0.1);
        subject.update_evenly(&[5], 1e-3);
        assert_eq!(subject.slot("state_sum", &[5]), [0.1f32 * 0.1 + 1e-3 * 1e-3; DIM], "{name}");
    }
}

#[test]
fn ftrl_keeps_weights_within_l1_at_exactly_zero() {
    let ids: Vec<i64> = (0..100).collect();
    let more = r#""initializer": {"kind": "zeros"}, "optimizer": {"kind": "ftrl", "l1": 1}"#;
    for RowType { name, .. } in ROW_TYPES {
        let subject = Subject::new(name, DIM, more);
        for step in 0..50 {
            let scale = if step % 2 == 0 { 0.9 } else { -0.9 };
            subject.update(&ids, &values(ids.len() * DIM, scale));
            assert!(subject.read(&ids).iter().all(|&w| w == 0.0), "{name}, step {step}");
        }
    }
}

/// Returns z and w after 200 steps of FTRL whose gradients, of mean -0.1 in half of the columns, do not depend on w.
fn ftrl_sums(dtype: &str, ids: &[i64]) -> (Vec<f32>, Vec<f32>) {
    let optimizer = r#"{"kind": "ftrl", "alpha": 0.1, "l1": 0.5, "l2": 0.1}"#;
    let subject = Subject::new(dtype, DIM, &format!(r#""optimizer": {optimizer}"#));
    for step in 0..200 {
        let gradient = |j: usize| ((j * 31 + step * 17) % 101) as f32 / 50.0 - 1.0 - 0.1 * (j % 2) as f32;
        subject.update(ids, &(0..ids.len() * DIM).map(gradient).collect::<Vec<_>>());
    }
    (subject.slot("z", ids), subject.read(ids))
}

#[test]
fn z_of_ftrl_sums_up_over_many_steps_as_with_float32() {
    let ids: Vec<i64> = (0..300).collect();
    let (exact_z, exact_w) = ftrl_sums("float32", &ids);
    assert!(exact_w.contains(&0.0) && exact_z.iter().any(|z| z.abs() > 5.0));
    for RowType { name, spacing, .. } in ROW_TYPES {
        let (z, w) = ftrl_sums(name, &ids);
        let (above, most) = distance(&z, &exact_z);
        // A weight of int8 is as far off as the greatest of its row, which is two and more, however small it is.
        let farther = if name == "int8" { 8.0 } else { 1.0 };
        assert!(
            above.abs() < f64::from(spacing) && most < 40.0 * farther * spacing,
            "{name} z: {above} {most}"
        );
        let (above, most) = distance(&w, &exact_w);
        assert!(
            above.abs() < f64::from(spacing) / 16.0 && most < farther * spacing,
            "{name} w: {above} {most}"
        );
    }
}

#[test]
fn z_of_ftrl_agrees_with_the_rounded_weights_of_a_written_row() {
    // z = -w * ((beta + sqrt(n)) / alpha + l2) - sign(w) * l1
    for RowType { name, nearest, .. } in ROW_TYPES {
        let optimizer = r#"{"kind": "ftrl", "alpha": 0.5, "beta": 1, "l1": 0.25, "l2": 2}"#;
        let subject = Subject::new(name, 1, &format!(r#""optimizer": {optimizer}"#));
        subject.write(&[1, 2], &[0.3, -0.7]);
        let z = |w: f32| -nearest(&[w])[0] * 4.0 - 0.25f32.copysign(w);
        assert_eq!(subject.slot("z", &[1, 2]), [z(0.3), z(-0.7)], "{name}");
    }
}

#[test]
fn ftrl_leaves_zero_when_z_passes_l1_however_small_the_steps() {
    let ids: Vec<i64> = (0..500).collect();
    let more = r#""initializer": {"kind": "zeros"}, "optimizer": {"kind": "ftrl", "l1": 1e-4}"#;
    let train = |dtype| {
        let subject = Subject::new(dtype, DIM, more);
        (0..200).for_each(|_| subject.update_evenly(&ids, -1e-6));
        (mean(subject.slot("z", &ids).into_iter()), mean(subject.read(&ids).into_iter()))
    };
    let (exact_z, exact_w) = train("float32");
    for RowType { name, .. } in ROW_TYPES {
        let (z, w) = train(name);
        assert!((z / exact_z - 1.0).abs() < 0.05, "{name}: z {z}, with float32 {exact_z}");
        assert!((w / exact_w - 1.0).abs() < 0.05, "{name}: w {w}, with float32 {exact_w}");
    }
}

#[test]
fn a_learning_rate_that_falls_a_little_at_every_step_does_not_rescale_the_weights_of_ftrl() {
    let ids: Vec<i64> = (0..100).collect();
    let rows = values(ids.len() * DIM, 0.9);
    for RowType { name, spacing, .. } in ROW_TYPES {
        let subject = Subject::new(name, DIM, r#""optimizer": {"kind": "ftrl", "alpha": 0.1}"#);
        subject.write(&ids, &rows);
        for step in 1..=200 {
            subject.store.set_learning_rate(subject.table, 0.1 * 0.998f64.powi(step), false).unwrap();
            subject.update_evenly(&ids, 0.0);
        }
        let product = |left: &[f32], right: &[f32]| left.iter().zip(right).map(|(l, r)| l * r).sum::<f32>();
        let scale = product(&subject.read(&ids), &rows) / product(&rows, &rows);
        assert!((scale - 1.0).abs() < spacing, "{name}: scaled by {scale}");
    }
}

#[test]
fn rows_take_less_memory() {
    const DIM: usize = 64;
    let bytes = |dtype: &str| {
        let subject = Subject::new(dtype, DIM, r#""seed": 0"#);
        subject.insert(&[1, 2, 3]);
        subject.store.statistics(subject.table).unwrap().bytes
    };
    for RowType { name, bytes: of_a_row, .. } in ROW_TYPES {
        assert_eq!(bytes("float32") - bytes(name), 3 * (DIM * 4 - of_a_row), "{name}");
    }
}

#[test]
fn a_bag_pools_the_rows_as_they_read() {
    let ids: Vec<i64> = (0..60).map(|j| j * j % 41).collect();
    for RowType { name, .. } in ROW_TYPES {
        for dim in DIMS {
            let subject = Subject::new(name, dim, "\"block_size\": 5");
            subject.update(&ids[..30], &values(30 * dim, 0.7));
            let exact = Subject::new("float32", dim, "\"block_size\": 5");
            exact.write(&ids, &subject.read(&ids));
            for mode in [PoolingMode::Sum, PoolingMode::Mean, PoolingMode::Max] {
                assert_eq!(subject.pool(&ids, mode), exact.pool(&ids, mode), "{name}, dim {dim}, {mode:?}");
            }
        }
    }
}

#[test]
fn the_policy_error_refuses_what_is_not_finite_and_changes_nothing() {
    for RowType { name, .. } in ROW_TYPES {
        let subject = Subject::new(name, 2, "\"seed\": 1");
        subject.write(&[1, 2], &[0.5; 4]);
        let written = subject.store.write(subject.table, &[1, 2], &[1.0, 1.0, 1.0, f32::INFINITY]);
        assert!(written.unwrap_err().to_string().contains("row of id 2 at position 1"), "{name}");
        let updated = subject.try_update(&[1, 2], &[1.0, 1.0, f32::NAN, 1.0], Step::Next);
        assert!(updated.unwrap_err().to_string().contains("gradient of id 2 at position 1"), "{name}");
        assert_eq!(subject.read(&[1, 2]), [0.5; 4], "{name}");
    }
}

#[test]
fn the_policy_skip_leaves_out_what_is_not_finite() {
    for RowType { name, .. } in ROW_TYPES {
        let subject = Subject::new(name, 1, r#""nan_policy": "skip", "optimizer": {"kind": "sgd", "lr": 1}"#);
        subject.write(&[1, 2, 3], &[0.5; 3]);
        subject.write(&[1, 2], &[f32::NAN, 1.0]);
        subject.update(&[2, 3], &[0.5, f32::INFINITY]);
        assert_eq!(subject.read(&[1, 2, 3]), [0.5; 3], "{name}");
        assert_eq!(subject.store.statistics(subject.table).unwrap().refusals, 2, "{name}");
    }
}

#[test]
fn the_policy_allow_keeps_what_is_not_finite() {
    for RowType { name, .. } in &ROW_TYPES[..2] {
        let subject = Subject::new(name, 3, r#""nan_policy": "allow""#);
        subject.write(&[1], &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        subject.update(&[2], &[f32::NAN, f32::INFINITY, 0.0]);
        let rows = subject.read(&[1, 2]);
        assert_eq!(rows[..2], [f32::INFINITY, f32::NEG_INFINITY], "{name}");
        assert!(rows[2].is_nan() && rows[3].is_nan(), "{name}");
        assert!(rows[4] == f32::NEG_INFINITY && rows[5].is_finite(), "{name}");
    }
}

#[test]
fn the_policy_allow_makes_a_row_of_8_bits_with_such_a_value_not_a_number() {
    for RowType { name, .. } in &ROW_TYPES[2..] {
        let subject = Subject::new(name, 3, r#""nan_policy": "allow""#);
        subject.write(&[1, 2], &[f32::INFINITY, 1.0, 0.0, 1.0, 0.0, -1.0]);
        subject.update(&[3], &[f32::NAN, 0.0, 0.0]);
        assert!(subject.read(&[1, 3]).iter().all(|value| value.is_nan()), "{name}");
        assert_eq!(subject.read(&[2]), [1.0, 0.0, -1.0], "{name}");
        subject.write(&[1], &[0.5; 3]);
        assert_eq!(subject.read(&[1]), [0.5; 3], "{name}");
    }
}

#[test]
fn a_float16_weight_stops_at_the_greatest_number() {
    let subject = Subject::new("float16", 2, r#""optimizer": {"kind": "sgd", "lr": 1}"#);
    subject.write(&[1], &[65_000.0, -65_000.0]);
    subject.update(&[1], &[-10_000.0, 10_000.0]);
    assert_eq!(subject.read(&[1]), [65_504.0, -65_504.0]);
    subject.write(&[1], &[1e30, -70_000.0]);
    assert_eq!(subject.read(&[1]), [65_504.0, -65_504.0]);
}

#[test]
fn a_bfloat16_weight_has_the_range_of_float32() {
    let subject = Subject::new("bfloat16", 2, r#""optimizer": {"kind": "sgd", "lr": 1}"#);
    subject.write(&[1], &[1e38, 1e-38]);
    subject.update(&[1], &[-1e38, 0.0]);
    let row = subject.read(&[1]);
    assert!((row[0] / 2e38 - 1.0).abs() < 0.01 && (row[1] / 1e-38 - 1.0).abs() < 0.01, "{row:?}");
}

#[test]
fn a_row_deleted_and_created_again_starts_as_it_first_did() {
    for RowType { name, .. } in ROW_TYPES {
        for optimizer in &optimizers() {
            let subject = Subject::new(name, DIM, &format!(r#""optimizer": {optimizer}"#));
            let (ids, gradients) = ([1, 2, 3], values(3 * DIM, 1.0));
            let initial = subject.read(&ids);
            let step = || subject.try_update(&ids, &gradients, Step::At(1)).unwrap();
            step();
            let first = subject.bits(&ids);
            step();
            subject.store.delete(subject.table, &ids).unwrap();
            assert_eq!(subject.read(&ids), initial, "{name}, {optimizer}");
            step();
            assert_eq!(subject.bits(&ids), first, "{name}, {optimizer}");
        }
    }
}

#[test]
fn a_table_opens_again_with_the_same_row_type_only() {
    let subject = Subject::new("bfloat16", DIM, "\"seed\": 1");
    let open = |dtype: &str| {
        let text = format!(r#"{{"dtype": "{dtype}", "seed": 1}}"#);
        subject.store.open_numbered("t", &TableConfig::from_json(DIM, &text).unwrap())
    };
    assert_eq!(open("bfloat16"), Ok(subject.table));
    assert!(open("float16").unwrap_err().to_string().contains("float16"));
}
