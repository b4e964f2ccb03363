//! Every optimizer against libtorch's, or against its equation in libtorch's tensors where libtorch has none.

// tier: test

use recstore_tch::{LocalStore, Result, TchTable};
use recstore_tests::{all_ids, assert_close, open};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 40;
const DIM: usize = 19;
const STEPS: i64 = 100;

fn normal(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

/// Trains all rows of a table, and a dense weight that starts from them by `dense(step, weight, gradients)`; compares.
fn compare(optimizer: &str, mut dense: impl FnMut(i64, &mut Tensor, &Tensor)) -> Result<()> {
    tch::manual_seed(7);
    let table = open(DIM, optimizer)?;
    let ids = all_ids(ROWS);
    let mut weight = table.read(&ids)?;
    for step in 1..=STEPS {
        let gradients = normal(&[ROWS, DIM as i64]);
        table.update(&ids, &gradients)?;
        dense(step, &mut weight, &gradients);
    }
    assert_close(&table.read(&ids)?, &weight, optimizer);
    Ok(())
}

/// Compares with an optimizer of libtorch's own.
fn compare_with_libtorch(optimizer: &str, config: impl OptimizerConfig) -> Result<()> {
    let variables = nn::VarStore::new(Device::Cpu);
    let mut parameter = variables.root().zeros("weight", &[ROWS, DIM as i64]);
    let mut libtorch = config.build(&variables, 0.02)?;
    compare(optimizer, |step, weight, gradients| {
        if step == 1 {
            tch::no_grad(|| parameter.copy_(weight));
        }
        libtorch.zero_grad();
        (&parameter * gradients).sum(Kind::Float).backward();
        libtorch.step();
        *weight = parameter.detach();
    })
}

#[test]
fn sgd_is_libtorchs() -> Result<()> {
    compare_with_libtorch(r#"{"kind": "sgd", "lr": 0.02}"#, nn::sgd(0.0, 0.0, 0.0, false))?;
    compare_with_libtorch(
        r#"{"kind": "sgd", "lr": 0.02, "weight_decay": 0.1}"#,
        nn::sgd(0.0, 0.0, 0.1, false),
    )
}

#[test]
fn momentum_is_libtorchs_where_every_row_is_touched() -> Result<()> {
    for nesterov in [false, true] {
        let optimizer = format!(
            r#"{{"kind": "sgd", "lr": 0.02, "momentum": 0.8, "nesterov": {nesterov}, "weight_decay": 0.1}}"#
        );
        compare_with_libtorch(&optimizer, nn::sgd(0.8, 0.0, 0.1, nesterov))?;
    }
    Ok(())
}

#[test]
fn rmsprop_is_libtorchs_where_every_row_is_touched() -> Result<()> {
    for (momentum, centered) in [(0.0, false), (0.8, false), (0.0, true), (0.8, true)] {
        let optimizer = format!(
            r#"{{"kind": "rmsprop", "lr": 0.02, "alpha": 0.9, "eps": 0.01, "weight_decay": 0.1,
                "momentum": {momentum}, "centered": {centered}}}"#
        );
        compare_with_libtorch(&optimizer, nn::rms_prop(0.9, 0.01, 0.1, momentum, centered))?;
    }
    Ok(())
}

#[test]
fn amsgrad_is_libtorchs_where_every_row_is_touched() -> Result<()> {
    compare_with_libtorch(
        r#"{"kind": "adam", "lr": 0.02, "betas": [0.9, 0.6], "eps": 1e-15, "amsgrad": true}"#,
        nn::adam(0.9, 0.6, 0.0).eps(1e-15).amsgrad(true),
    )?;
    compare_with_libtorch(
        r#"{"kind": "adamw", "lr": 0.02, "betas": [0.9, 0.6], "weight_decay": 0.1, "amsgrad": true}"#,
        nn::adamw(0.9, 0.6, 0.1).amsgrad(true),
    )
}

#[test]
fn adadelta_follows_its_equation() -> Result<()> {
    let mut squares = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    let mut steps = squares.zeros_like();
    compare(r#"{"kind": "adadelta", "lr": 0.5, "eps": 0.01}"#, |_, weight, gradients| {
        squares = &squares * 0.9 + gradients.square() * 0.1;
        let moved = (&steps + 0.01).sqrt() / (&squares + 0.01).sqrt() * gradients;
        steps = &steps * 0.9 + moved.square() * 0.1;
        *weight -= moved * 0.5;
    })
}

#[test]
fn rowwise_adam_averages_squares_over_the_row() -> Result<()> {
    let mut m = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    let mut v = Tensor::zeros([ROWS, 1], (Kind::Float, Device::Cpu));
    compare(r#"{"kind": "rowwise_adam", "lr": 0.02, "eps": 0.1}"#, |step, weight, gradients| {
        let corrections = [0.9f64, 0.999].map(|beta| 1.0 - beta.powi(step as i32));
        m += (gradients - &m) * 0.1;
        v += (gradients.square().mean_dim([1i64].as_slice(), true, Kind::Float) - &v) * 0.001;
        *weight -= &m / (v.sqrt() + 0.1) * (0.02 * corrections[1].sqrt() / corrections[0]);
    })
}

#[test]
fn lamb_steps_as_far_as_the_row_is_long() -> Result<()> {
    let mut m = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    let mut v = m.zeros_like();
    let norms = |rows: &Tensor| rows.square().sum_dim_intlist([1i64].as_slice(), true, Kind::Float).sqrt();
    compare(r#"{"kind": "lamb", "lr": 0.02, "eps": 0.1, "weight_decay": 0.1}"#, |step, weight, gradients| {
        let corrections = [0.9f64, 0.999].map(|beta| 1.0 - beta.powi(step as i32));
        m += (gradients - &m) * 0.1;
        v += (gradients.square() - &v) * 0.001;
        let root = (&v / corrections[1]).sqrt() + 0.1;
        let direction = &m / corrections[0] / root + &*weight * 0.1;
        *weight -= &direction * (norms(weight) / norms(&direction)) * 0.02;
    })
}

#[test]
fn lion_moves_by_the_sign_of_the_moment() -> Result<()> {
    let mut m = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    compare(r#"{"kind": "lion", "lr": 0.02, "weight_decay": 0.1}"#, |_, weight, gradients| {
        let sign = (&m * 0.9 + gradients * 0.1).sign();
        *weight = &*weight * (1.0 - 0.02 * 0.1) - sign * 0.02;
        m = &m * 0.99 + gradients * 0.01;
    })
}

/// The store adds eps as `torch.optim.SparseAdam` does, before the bias is corrected, and `Adam` after: with an eps
/// that no root of a moment comes near to, the two are one.
#[test]
fn adam_is_libtorchs_where_every_row_is_touched() -> Result<()> {
    for (more, config) in [
        (r#""betas": [0.8, 0.99]"#, nn::adam(0.8, 0.99, 0.0)),
        (r#""weight_decay": 0.1"#, nn::adam(0.9, 0.999, 0.1)),
        (r#""bias_correction": "row""#, nn::adam(0.9, 0.999, 0.0)),
    ] {
        let optimizer = format!(r#"{{"kind": "adam", "lr": 0.02, "eps": 1e-15, {more}}}"#);
        compare_with_libtorch(&optimizer, config.eps(1e-15))?;
    }
    Ok(())
}

#[test]
fn adam_adds_eps_as_sparse_adam_does() -> Result<()> {
    let mut m = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    let mut v = m.zeros_like();
    compare(r#"{"kind": "adam", "lr": 0.02, "eps": 0.1}"#, |step, weight, gradients| {
        let corrections = [0.9f64, 0.999].map(|beta| 1.0 - beta.powi(step as i32));
        m += (gradients - &m) * 0.1;
        v += (gradients.square() - &v) * 0.001;
        *weight -= &m / (v.sqrt() + 0.1) * (0.02 * corrections[1].sqrt() / corrections[0]);
    })
}

#[test]
fn adamw_is_libtorchs_where_every_row_is_touched() -> Result<()> {
    for correction in ["table", "row"] {
        compare_with_libtorch(
            &format!(
                r#"{{"kind": "adamw", "lr": 0.02, "weight_decay": 0.1, "bias_correction": "{correction}"}}"#
            ),
            nn::adamw(0.9, 0.999, 0.1),
        )?;
    }
    // The share that decays by default is libtorch's default too.
    compare_with_libtorch(r#"{"kind": "adamw", "lr": 0.02}"#, nn::AdamW::default())
}

#[test]
fn adagrad_of_the_torch_convention_is_torch_optims() -> Result<()> {
    let mut sum = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    compare(
        r#"{"kind": "adagrad", "lr": 0.02, "eps": 1e-10, "weight_decay": 0.1, "convention": "torch"}"#,
        |_, weight, gradients| {
            let gradients = gradients + &*weight * 0.1;
            sum += gradients.square();
            *weight -= gradients * 0.02 / (sum.sqrt() + 1e-10);
        },
    )
}

#[test]
fn adagrads_rate_falls_with_the_steps() -> Result<()> {
    let mut sum = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    compare(
        r#"{"kind": "adagrad", "lr": 0.02, "lr_decay": 0.1, "convention": "torch"}"#,
        |step, weight, gradients| {
            sum += gradients.square();
            *weight -= gradients * (0.02 / (1.0 + 0.1 * (step - 1) as f64)) / (sum.sqrt() + 1e-10);
        },
    )
}

#[test]
fn adagrad_of_the_recstore_convention_has_eps_within_the_root() -> Result<()> {
    let mut sum = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    compare(r#"{"kind": "adagrad", "lr": 0.02, "eps": 0.5}"#, |_, weight, gradients| {
        sum += gradients.square();
        *weight -= gradients * 0.02 / (&sum + 0.5).sqrt();
    })
}

#[test]
fn rowwise_adagrad_sums_squares_over_the_row_or_averages_them() -> Result<()> {
    let zeros = || Tensor::zeros([ROWS, 1], (Kind::Float, Device::Cpu));
    let mut sum = zeros();
    compare(r#"{"kind": "rowwise_adagrad", "lr": 0.02, "eps": 0.5}"#, |_, weight, gradients| {
        sum += gradients.square().sum_dim_intlist([1i64].as_slice(), true, Kind::Float);
        *weight -= gradients * 0.02 / (&sum + 0.5).sqrt();
    })?;
    sum = zeros();
    compare(
        r#"{"kind": "rowwise_adagrad", "lr": 0.02, "eps": 0.5, "convention": "torch"}"#,
        |_, weight, gradients| {
            sum += gradients.square().mean_dim([1i64].as_slice(), true, Kind::Float);
            *weight -= gradients * 0.02 / (sum.sqrt() + 0.5);
        },
    )
}

#[test]
fn ftrl_follows_its_equation() -> Result<()> {
    let (alpha, beta, l1, l2) = (0.02, 1.0, 0.3, 0.5);
    let curvature = |n: &Tensor| (n.sqrt() + beta) / alpha + l2;
    let mut n = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    let mut z = n.zeros_like();
    compare(
        r#"{"kind": "ftrl", "alpha": 0.02, "beta": 1, "l1": 0.3, "l2": 0.5}"#,
        |step, weight, gradients| {
            if step == 1 {
                z = -(&*weight * curvature(&n)) - weight.sign() * l1;
            }
            let grown = &n + gradients.square();
            z += gradients - (grown.sqrt() - n.sqrt()) / alpha * &*weight;
            n = grown;
            let shrunk = (z.sign() * l1 - &z) * z.abs().gt(l1);
            *weight = shrunk / curvature(&n);
        },
    )
}

/// Trains `table` on ids of many shapes with duplicates, and its dense weight on the summed gradients.
fn compare_with_duplicates(
    table: &TchTable<LocalStore>,
    mut dense: impl FnMut(&mut Tensor, &Tensor),
) -> Result<()> {
    tch::manual_seed(8);
    let mut weight = table.read(&all_ids(ROWS))?;
    for step in 0..STEPS {
        let shape = [&[][..], &[7], &[3, 5], &[2, 0], &[2, 3, 4]][step as usize % 5];
        let ids = Tensor::randint(ROWS / 4, shape, (Kind::Int64, Device::Cpu));
        let gradients = normal(&[shape, &[DIM as i64]].concat());
        table.update(&ids, &gradients)?;
        let rows = gradients.view([-1, DIM as i64]);
        let summed = weight.zeros_like().index_add(0, &ids.view([-1]), &rows);
        dense(&mut weight, &summed);
    }
    assert_close(&table.read(&all_ids(ROWS))?, &weight, "with duplicates");
    Ok(())
}

#[test]
fn duplicates_in_ids_of_any_shape_are_summed_before_the_step() -> Result<()> {
    let sgd = open(DIM, r#"{"kind": "sgd", "lr": 0.02}"#)?;
    compare_with_duplicates(&sgd, |weight, gradients| *weight -= gradients * 0.02)?;
    let adagrad = open(DIM, r#"{"kind": "adagrad", "lr": 0.02, "convention": "torch"}"#)?;
    let mut sum = Tensor::zeros([ROWS, DIM as i64], (Kind::Float, Device::Cpu));
    compare_with_duplicates(&adagrad, |weight, gradients| {
        sum += gradients.square();
        *weight -= gradients * 0.02 / (sum.sqrt() + 1e-10);
    })?;
    assert!(sgd.handle().statistics().map(|statistics| statistics.rows <= 10)?);
    Ok(())
}

#[test]
fn a_learning_rate_set_between_steps_is_the_one_that_counts() -> Result<()> {
    let table = open(DIM, r#"{"kind": "sgd", "lr": 0.02}"#)?;
    let ids = all_ids(ROWS);
    let (before, gradients) = (table.read(&ids)?, normal(&[ROWS, DIM as i64]));
    table.handle().set_learning_rate(0.5)?;
    table.update(&ids, &gradients)?;
    assert_close(&table.read(&ids)?, &(before - gradients * 0.5), "after set_learning_rate");
    Ok(())
}
