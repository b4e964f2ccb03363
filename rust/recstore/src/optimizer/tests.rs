//! Every rule against its equation in double precision, and every SIMD level against the baseline.

use super::row_rule::{RowRule, WithRule, power};
use super::{OptimizerConfig, optimizers};
use crate::config::TableConfig;
use crate::kernel::simd::{Kernel, Lanes, Simd, SimdLevel};

const DIM: usize = 21; // One full run of lanes and a rest.

fn config(text: &str) -> OptimizerConfig {
    let text = format!(r#"{{"optimizer": {text}}}"#);
    TableConfig::from_json(DIM, &text).unwrap().optimizer
}

fn gradient(step: usize) -> Vec<f32> {
    (0..DIM).map(|j| ((j * 7 + step * 13) % 11) as f32 * 0.3 - 1.4).collect()
}

/// A step of one record.
struct OneStep<'a> {
    level: SimdLevel,
    record: &'a mut [f32],
    gradient: &'a [f32],
}

impl WithRule for OneStep<'_> {
    fn run(self, rule: &impl RowRule) {
        let Self { level, record, gradient } = self;
        Simd::new(level).unwrap().run(RuleKernel { rule, record, gradient });
    }
}

struct RuleKernel<'a, R> {
    rule: &'a R,
    record: &'a mut [f32],
    gradient: &'a [f32],
}

impl<R: RowRule> Kernel for RuleKernel<'_, R> {
    #[inline(always)]
    fn run(self, _: impl Lanes) {
        let (weights, state) = self.record.split_at_mut(self.gradient.len());
        self.rule.step(weights, state, self.gradient);
    }
}

fn train(config: &OptimizerConfig, level: SimdLevel, steps: usize) -> Vec<f32> {
    let state: usize = config.slots(DIM).iter().map(|slot| slot.width).sum();
    let mut record = vec![0.0; DIM + state];
    for (j, w) in record[..DIM].iter_mut().enumerate() {
        *w = j as f32 * 0.05 - 0.5;
    }
    let (weights, state) = record.split_at_mut(DIM);
    config.prepare(config.learning_rate(), 1).adopt_weights(weights, state);
    for step in 1..=steps {
        let gradients = gradient(step);
        let rule = config.prepare(config.learning_rate(), step as u64);
        rule.run(OneStep { level, record: &mut record, gradient: &gradients });
    }
    record
}

/// Holds 20 steps of a rule against `reference(w, state, g, step)`, element by element in double precision.
pub(super) fn check(text: &str, reference: impl Fn(&mut f64, &mut [f64; 3], f64, usize)) {
    let config = config(text);
    let got = train(&config, SimdLevel::Baseline, 20);
    for (j, got) in got.iter().take(DIM).enumerate() {
        let (mut w, mut state) = (j as f64 * 0.05 - 0.5, [0.0; 3]);
        for step in 1..=20 {
            reference(&mut w, &mut state, f64::from(gradient(step)[j]), step);
        }
        assert!((f64::from(*got) - w).abs() < 1e-5, "{text} column {j}: {got} {w}");
    }
}

#[test]
fn sgd_follows_its_equation() {
    check(r#"{"kind": "sgd", "lr": 0.1, "weight_decay": 0.01}"#, |w, _, g, _| {
        *w -= 0.1 * (g + 0.01 * *w);
    });
}

#[test]
fn adagrad_follows_both_conventions() {
    check(r#"{"kind": "adagrad", "lr": 0.1, "eps": 0.5}"#, |w, s, g, _| {
        s[0] += g * g;
        *w -= 0.1 * g / (s[0] + 0.5).sqrt();
    });
    check(
        r#"{"kind": "adagrad", "lr": 0.1, "eps": 0.5, "convention": "torch", "weight_decay": 0.1}"#,
        |w, s, g, _| {
            let g = g + 0.1 * *w;
            s[0] += g * g;
            *w -= 0.1 * g / (s[0].sqrt() + 0.5);
        },
    );
}

#[test]
fn rowwise_adagrad_follows_both_conventions() {
    let squares = |step: usize| gradient(step).iter().map(|&g| f64::from(g).powi(2)).sum::<f64>();
    check(r#"{"kind": "rowwise_adagrad", "lr": 0.1, "eps": 0.5}"#, |w, s, g, step| {
        s[0] += squares(step);
        *w -= 0.1 * g / (s[0] + 0.5).sqrt();
    });
    check(r#"{"kind": "rowwise_adagrad", "lr": 0.1, "eps": 0.5, "convention": "torch"}"#, |w, s, g, step| {
        s[0] += squares(step) / DIM as f64;
        *w -= 0.1 * g / (s[0].sqrt() + 0.5);
    });
}

#[test]
fn adam_follows_its_equation() {
    for bias_correction in ["table", "row"] {
        let text = format!(
            r#"{{"kind": "adam", "lr": 0.1, "eps": 0.01, "weight_decay": 0.1, "bias_correction": "{bias_correction}"}}"#
        );
        check(&text, |w, s, g, step| {
            let g = g + 0.1 * *w;
            s[0] = 0.9 * s[0] + 0.1 * g;
            s[1] = 0.999 * s[1] + 0.001 * g * g;
            let t = step as i32;
            let scale = 0.1 * (1.0 - 0.999f64.powi(t)).sqrt() / (1.0 - 0.9f64.powi(t));
            *w -= scale * s[0] / (s[1].sqrt() + 0.01);
        });
    }
}

#[test]
fn adamw_follows_its_equation() {
    for bias_correction in ["table", "row"] {
        let text = format!(
            r#"{{"kind": "adamw", "lr": 0.1, "eps": 0.01, "weight_decay": 0.1, "bias_correction": "{bias_correction}"}}"#
        );
        check(&text, |w, s, g, step| {
            *w *= 1.0 - 0.1 * 0.1;
            s[0] = 0.9 * s[0] + 0.1 * g;
            s[1] = 0.999 * s[1] + 0.001 * g * g;
            let t = step as i32;
            let corrected = (s[1] / (1.0 - 0.999f64.powi(t))).sqrt();
            *w -= 0.1 / (1.0 - 0.9f64.powi(t)) * s[0] / (corrected + 0.01);
        });
    }
}

#[test]
fn adagrads_rate_falls_with_the_steps() {
    check(
        r#"{"kind": "adagrad", "lr": 0.1, "eps": 0.01, "lr_decay": 0.5, "convention": "torch"}"#,
        |w, s, g, step| {
            s[0] += g * g;
            *w -= 0.1 / (1.0 + 0.5 * (step - 1) as f64) * g / (s[0].sqrt() + 0.01);
        },
    );
}

#[test]
fn momentum_follows_both_forms() {
    check(r#"{"kind": "sgd", "lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}"#, |w, s, g, _| {
        s[0] = 0.9 * s[0] + g + 0.01 * *w;
        *w -= 0.1 * s[0];
    });
    check(r#"{"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": true}"#, |w, s, g, _| {
        s[0] = 0.9 * s[0] + g;
        *w -= 0.1 * (g + 0.9 * s[0]);
    });
}

#[test]
fn rmsprop_follows_its_equation_with_and_without_center_and_momentum() {
    for (centered, momentum) in [(false, 0.0), (true, 0.0), (false, 0.8), (true, 0.8)] {
        let text = format!(
            r#"{{"kind": "rmsprop", "lr": 0.01, "alpha": 0.95, "eps": 0.1, "weight_decay": 0.1, "centered": {centered},
                "momentum": {momentum}}}"#
        );
        check(&text, |w, s, g, _| {
            let g = g + 0.1 * *w;
            s[0] = 0.95 * s[0] + 0.05 * g * g;
            s[1] = 0.95 * s[1] + 0.05 * g;
            let average = if centered { s[1] } else { 0.0 };
            s[2] = momentum * s[2] + g / ((s[0] - average * average).sqrt() + 0.1);
            *w -= 0.01 * s[2];
        });
    }
}

#[test]
fn rmsprop_of_equal_gradients_takes_no_root_below_zero() {
    let config = config(r#"{"kind": "rmsprop", "lr": 0.01, "centered": true}"#);
    let mut record = vec![0.0; 3 * DIM];
    for step in 1..=2_000 {
        let rule = config.prepare(0.01, step);
        rule.run(OneStep { level: SimdLevel::Baseline, record: &mut record, gradient: &[1.1; DIM] });
        assert!(record.iter().all(|value| value.is_finite()), "step {step}");
    }
}

#[test]
fn adadelta_follows_its_equation() {
    check(r#"{"kind": "adadelta", "lr": 0.5, "eps": 0.01, "weight_decay": 0.1}"#, |w, s, g, _| {
        let g = g + 0.1 * *w;
        s[0] = 0.9 * s[0] + 0.1 * g * g;
        let x = (s[1] + 0.01).sqrt() / (s[0] + 0.01).sqrt() * g;
        s[1] = 0.9 * s[1] + 0.1 * x * x;
        *w -= 0.5 * x;
    });
}

#[test]
fn lion_moves_by_the_learning_rate() {
    check(r#"{"kind": "lion", "lr": 0.01, "weight_decay": 0.1}"#, |w, s, g, _| {
        let c = 0.9 * s[0] + 0.1 * g;
        let sign = if c == 0.0 { 0.0 } else { c.signum() };
        *w = *w * (1.0 - 0.01 * 0.1) - 0.01 * sign;
        s[0] = 0.99 * s[0] + 0.01 * g;
    });
    let config = config(r#"{"kind": "lion", "lr": 0.01}"#);
    let mut record = vec![0.25; DIM];
    record.resize(2 * DIM, 0.0);
    config.prepare(0.01, 1).run(OneStep {
        level: SimdLevel::detect(),
        record: &mut record,
        gradient: &[-0.0; DIM],
    });
    assert_eq!(record[..DIM], [0.25; DIM]);
}

#[test]
fn amsgrad_keeps_the_greatest_second_moment() {
    for kind in ["adam", "adamw"] {
        let text = format!(
            r#"{{"kind": "{kind}", "lr": 0.1, "betas": [0.9, 0.5], "eps": 0.01, "weight_decay": 0, "amsgrad": true}}"#
        );
        check(&text, |w, s, g, step| {
            s[0] = 0.9 * s[0] + 0.1 * g;
            s[1] = 0.5 * s[1] + 0.5 * g * g;
            s[2] = s[2].max(s[1]);
            let (first, second) = (1.0 - 0.9f64.powi(step as i32), 1.0 - 0.5f64.powi(step as i32));
            // The eps of Adam is beside the root before its correction, as in `torch.optim.SparseAdam`.
            let root = if kind == "adam" {
                (s[2].sqrt() + 0.01) / second.sqrt()
            } else {
                (s[2] / second).sqrt() + 0.01
            };
            *w -= 0.1 / first * s[0] / root;
        });
    }
}

#[test]
fn rowwise_adam_averages_squares_over_the_row() {
    for bias_correction in ["table", "row"] {
        let text = format!(
            r#"{{"kind": "rowwise_adam", "lr": 0.1, "eps": 0.01, "bias_correction": "{bias_correction}"}}"#
        );
        check(&text, |w, s, g, step| {
            let squares = gradient(step).iter().map(|&g| f64::from(g).powi(2)).sum::<f64>();
            s[0] = 0.9 * s[0] + 0.1 * g;
            s[1] = 0.999 * s[1] + 0.001 * squares / DIM as f64;
            let t = step as i32;
            let scale = 0.1 * (1.0 - 0.999f64.powi(t)).sqrt() / (1.0 - 0.9f64.powi(t));
            *w -= scale * s[0] / (s[1].sqrt() + 0.01);
        });
    }
}

/// Twenty steps of LAMB in double precision.
fn lamb(weight_decay: f64) -> Vec<f64> {
    let mut rows: Vec<[f64; 3]> = (0..DIM).map(|j| [j as f64 * 0.05 - 0.5, 0.0, 0.0]).collect();
    for step in 1..=20 {
        let (first, second) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
        let gradients = gradient(step as usize);
        for ([_, m, v], g) in rows.iter_mut().zip(&gradients) {
            let g = f64::from(*g);
            (*m, *v) = (0.9 * *m + 0.1 * g, 0.999 * *v + 0.001 * g * g);
        }
        let directions: Vec<f64> = rows
            .iter()
            .map(|[w, m, v]| m / first / ((v / second).sqrt() + 0.01) + weight_decay * w)
            .collect();
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let ratio = norm(&mut rows.iter().map(|row| row[0])) / norm(&mut directions.iter().copied());
        rows.iter_mut().zip(&directions).for_each(|(row, direction)| row[0] -= 0.1 * ratio * direction);
    }
    rows.into_iter().map(|row| row[0]).collect()
}

#[test]
fn lamb_steps_as_far_as_the_row_is_long() {
    for (bias_correction, weight_decay) in [("table", 0.0), ("row", 0.1)] {
        let text = format!(
            r#"{{"kind": "lamb", "lr": 0.1, "eps": 0.01, "weight_decay": {weight_decay},
                "bias_correction": "{bias_correction}"}}"#
        );
        let got = train(&config(&text), SimdLevel::Baseline, 20);
        for (j, (got, expected)) in got.iter().zip(lamb(weight_decay)).enumerate() {
            assert!((f64::from(*got) - expected).abs() < 1e-5, "{text} column {j}: {got} {expected}");
        }
    }
}

#[test]
fn lamb_moves_a_row_of_zeros_and_leaves_one_without_a_direction() {
    let config = config(r#"{"kind": "lamb", "lr": 0.1}"#);
    let mut record = vec![0.0; 3 * DIM];
    let mut step = |gradient: &[f32], number| {
        config.prepare(0.1, number).run(OneStep {
            level: SimdLevel::detect(),
            record: &mut record,
            gradient,
        });
        record[0]
    };
    assert_eq!(step(&[0.0; DIM], 1), 0.0);
    let moved = step(&[1.0; DIM], 2);
    assert!(moved < 0.0 && moved.is_finite(), "{moved}");
}

fn ftrl_weight(z: f64, n: f64, alpha: f64) -> f64 {
    let shrunk = if z.abs() <= 0.3 { 0.0 } else { 0.3f64.copysign(z) - z };
    shrunk / ((1.0 + n.sqrt()) / alpha + 0.5)
}

#[test]
fn ftrl_follows_its_equation_from_any_start() {
    check(r#"{"kind": "ftrl", "alpha": 0.2, "beta": 1, "l1": 0.3, "l2": 0.5}"#, |w, s, g, step| {
        if step == 1 {
            let sign = if *w == 0.0 { 0.0 } else { w.signum() };
            s[1] = -*w * (1.0 / 0.2 + 0.5) - sign * 0.3;
        }
        let old = s[0];
        s[0] += g * g;
        s[1] += g - (s[0].sqrt() - old.sqrt()) / 0.2 * *w;
        *w = ftrl_weight(s[1], s[0], 0.2);
    });
}

#[test]
fn ftrl_keeps_its_weights_when_alpha_changes() {
    let config = config(r#"{"kind": "ftrl", "alpha": 0.2, "l1": 0.01}"#);
    let mut record = train(&config, SimdLevel::Baseline, 5);
    let before = record[..DIM].to_vec();
    let step = OneStep { level: SimdLevel::detect(), record: &mut record, gradient: &[0.0; DIM] };
    config.prepare(0.02, 6).run(step);
    for (w, before) in record.iter().zip(&before) {
        assert!((w - before).abs() < 1e-6, "{w} {before}");
    }
}

#[test]
fn every_simd_level_gives_the_bits_of_the_baseline() {
    const MORE: &[&str] = &[
        r#"{"kind": "sgd"}"#,
        r#"{"kind": "sgd", "momentum": 0.9}"#,
        r#"{"kind": "adamw", "amsgrad": true, "bias_correction": "row"}"#,
        r#"{"kind": "ftrl", "l1": 0.3, "l2": 0.1}"#,
    ];
    let forms = optimizers().into_iter().flat_map(|rule| rule["forms"].as_array().unwrap().clone());
    let forms = forms.map(|form| form.to_string());
    for text in forms.chain(MORE.iter().map(|text| (*text).to_owned())) {
        let bits =
            |level| -> Vec<u32> { train(&config(&text), level, 30).iter().map(|x| x.to_bits()).collect() };
        let baseline = bits(SimdLevel::Baseline);
        for level in SimdLevel::available() {
            assert_eq!(bits(level), baseline, "{text} {level}");
        }
    }
}

#[test]
fn power_multiplies_as_often_as_asked() {
    assert_eq!(power(3.0, 0), 1.0);
    assert_eq!(power(3.0, 5), 243.0);
    assert!((power(0.999, 1000) - 0.999f64.powi(1000)).abs() < 1e-13);
}
