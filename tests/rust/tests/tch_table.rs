//! Training with tensors: rows of a table in a loss, against a dense `nn::embedding`, and what is refused.

// tier: all

use recstore_tch::{EmbeddingStore, Error, GradientCollector, Result};
use recstore_tests::{all_ids, assert_close, open};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 30;
const DIM: usize = 4;
const SGD: &str = r#"{"kind": "sgd", "lr": 0.1}"#;

/// A loss that couples all rows, so that a wrong gradient of one shows in the others.
fn loss(rows: &Tensor) -> Tensor {
    rows.tanh().sum_dim_intlist([0i64].as_slice(), false, Kind::Float).square().mean(Kind::Float)
}

#[test]
fn a_model_on_looked_up_rows_trains_as_one_on_a_dense_embedding() -> Result<()> {
    tch::manual_seed(1);
    let table = open(DIM, SGD)?;
    let variables = nn::VarStore::new(Device::Cpu);
    let mut embedding = nn::embedding(variables.root(), ROWS, DIM as i64, Default::default());
    tch::no_grad(|| embedding.ws.copy_(&table.read(&all_ids(ROWS)).expect("valid ids")));
    let mut sgd = nn::sgd(0.0, 0.0, 0.0, false).build(&variables, 0.1)?;
    for _ in 0..30 {
        let ids = Tensor::randint(ROWS, [3, 5], (Kind::Int64, Device::Cpu)).transpose(0, 1);
        sgd.backward_step(&loss(&embedding.forward(&ids).view([-1, DIM as i64])));
        let looked_up = table.lookup(&ids)?;
        loss(&looked_up.rows().view([-1, DIM as i64])).backward();
        looked_up.step()?;
    }
    assert_close(&table.read(&all_ids(ROWS))?, &embedding.ws.detach(), "after 30 steps");
    Ok(())
}

#[test]
fn looked_up_rows_are_a_leaf_in_the_shape_of_the_ids() -> Result<()> {
    let table = open(DIM, SGD)?;
    let ids = all_ids(6).view([2, 3]);
    let looked_up = table.lookup(&ids)?;
    assert_eq!(looked_up.rows().size(), [2, 3, DIM as i64]);
    assert!(looked_up.rows().requires_grad() && looked_up.rows().is_leaf());
    assert!(looked_up.rows().detach().equal(&table.read(&ids)?));
    assert_eq!(table.handle().statistics()?.rows, 0);
    Ok(())
}

#[test]
fn lookups_collected_together_take_one_step() -> Result<()> {
    let adagrad = r#"{"kind": "adagrad", "lr": 0.1}"#;
    let (together, expected) = (open(DIM, adagrad)?, open(DIM, adagrad)?);
    let ids = Tensor::from_slice(&[1i64, 2, 1]);
    let collector = GradientCollector::default();
    for factor in [1.0, 2.0] {
        let looked_up = together.lookup(&ids)?;
        (looked_up.rows() * factor).sum(Kind::Float).backward();
        looked_up.collect(&collector)?;
    }
    assert_eq!(together.handle().statistics()?.step, 0);
    GradientCollector::apply_to(&**together.handle().store(), &[&collector])?;
    expected.update(&ids, &Tensor::full([3, DIM as i64], 3.0, (Kind::Float, Device::Cpu)))?;
    assert!(together.read(&ids)?.equal(&expected.read(&ids)?));
    assert_eq!(together.handle().statistics()?.step, 1);
    Ok(())
}

#[test]
fn ids_changed_after_the_lookup_do_not_move_its_gradients() -> Result<()> {
    let table = open(DIM, SGD)?;
    let mut ids = Tensor::from_slice(&[5i64]);
    let looked_up = table.lookup(&ids)?;
    looked_up.rows().sum(Kind::Float).backward();
    _ = ids.fill_(9);
    looked_up.step()?;
    assert_eq!(table.handle().table().ids()?, [5]);
    Ok(())
}

#[test]
fn rows_that_no_loss_reached_take_no_step() -> Result<()> {
    let table = open(DIM, SGD)?;
    let collector = GradientCollector::default();
    table.lookup(&all_ids(3))?.step()?;
    table.lookup(&all_ids(3))?.collect(&collector)?;
    assert!(collector.tables().is_empty());
    assert_eq!(table.handle().statistics()?.step, 0);
    Ok(())
}

#[test]
fn tensors_of_another_type_or_shape_are_refused_by_name() -> Result<()> {
    let table = open(DIM, SGD)?;
    let (ids, rows) = (all_ids(6).view([2, 3]), Tensor::ones([2, 3, 4], (Kind::Float, Device::Cpu)));
    let message = |result: Result<()>| result.err().map_or_else(String::new, |error| error.to_string());
    let read = |ids: &Tensor| message(table.read(ids).map(drop));
    assert_eq!(read(&rows), "emb_read: table \"t\" takes int64 or int32 ids, got Float");
    assert_eq!(
        message(table.write(&ids, &rows.to_kind(Kind::Double))),
        "emb_write: table \"t\" takes float32 rows, got Double"
    );
    assert_eq!(
        message(table.update(&ids, &rows.view([6, 4]))),
        "emb_update: table \"t\" expects gradient rows of shape [2, 3, 4] for these ids, got [6, 4]"
    );
    assert_eq!(
        message(table.write(&ids, &rows.narrow(2, 0, 3))),
        "emb_write: table \"t\" expects rows of shape [2, 3, 4] for these ids, got [2, 3, 3]"
    );
    assert!(matches!(table.read(&Tensor::new()), Err(Error::Torch(_))));
    assert_eq!(table.handle().statistics()?.rows, 0);
    Ok(())
}

#[test]
fn what_the_store_refuses_keeps_its_message() -> Result<()> {
    let table = open(DIM, SGD)?;
    let gradients = Tensor::full([2, DIM as i64], f64::NAN, (Kind::Float, Device::Cpu));
    let refused = table.update(&all_ids(2), &gradients);
    assert!(matches!(&refused, Err(Error::Store(recstore::Error::NonFinite { id: 0, .. }))), "{refused:?}");
    table.handle().store().drop_table("t")?;
    let refused = table.lookup(&all_ids(2));
    assert!(matches!(&refused, Err(Error::Store(recstore::Error::UnknownHandle { .. }))), "{refused:?}");
    Ok(())
}
