//! Trains a click model in Rust alone: rows of users and items in the store, dense layers over them in tch.
//!
//! `cargo run --release --package recstore-tch --example train_with_tch`

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::sync::Arc;

use recstore_tch::{LocalStore, Result, TableConfig, TchTable};
use tch::nn::{Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor, nn};

const BATCH: i64 = 512;
const STEPS: i64 = 400;
const DIM: usize = 8;

struct Clicks {
    user: Tensor,
    item: Tensor,
    labels: Tensor,
}

/// Draws clicks: users and items come in three kinds, and a user clicks mostly on items of its own.
fn draw_clicks() -> Clicks {
    let user = Tensor::randint(1000, [BATCH], (Kind::Int64, Device::Cpu));
    let item = Tensor::randint(500, [BATCH], (Kind::Int64, Device::Cpu));
    let is_own_kind = user.remainder(3).eq_tensor(&item.remainder(3)).to_kind(Kind::Float);
    Clicks { user, item, labels: (is_own_kind * 0.9 + 0.05).bernoulli() }
}

/// Two tables, and layers over the rows of a user and an item side by side.
struct Model {
    user: TchTable<LocalStore>,
    item: TchTable<LocalStore>,
    dense: nn::Sequential,
}

impl Model {
    fn new(root: &nn::Path<'_>) -> Result<Self> {
        let json =
            r#"{"initializer": {"kind": "normal", "std": 0.1}, "optimizer": {"kind": "adagrad", "lr": 0.1}}"#;
        let (store, config) = (Arc::new(LocalStore::default()), TableConfig::from_json(DIM, json)?);
        Ok(Self {
            user: TchTable::open(Arc::clone(&store), "user", &config)?,
            item: TchTable::open(store, "item", &config)?,
            dense: nn::seq()
                .add(nn::linear(root / "hidden", 2 * DIM as i64, 32, Default::default()))
                .add_fn(Tensor::relu)
                .add(nn::linear(root / "logit", 32, 1, Default::default())),
        })
    }

    /// Returns the logits `[BATCH]` over rows `[BATCH, DIM]`.
    fn logits(&self, user: &Tensor, item: &Tensor) -> Tensor {
        self.dense.forward(&Tensor::cat(&[user, item], 1)).view([-1])
    }

    /// Takes one step with the tables' optimizers and that of the layers; returns the loss.
    fn train(&self, clicks: &Clicks, layers: &mut nn::Optimizer) -> Result<f64> {
        let (user, item) = (self.user.lookup(&clicks.user)?, self.item.lookup(&clicks.item)?);
        let logits = self.logits(user.rows(), item.rows());
        let loss =
            logits.binary_cross_entropy_with_logits::<Tensor>(&clicks.labels, None, None, Reduction::Mean);
        layers.backward_step(&loss); // The rows get their gradients here, too.
        user.step()?;
        item.step()?;
        Ok(f64::try_from(loss)?)
    }

    /// Returns the share of labels that are predicted right.
    fn accuracy(&self, clicks: &Clicks) -> Result<f64> {
        let logits = self.logits(&self.user.read(&clicks.user)?, &self.item.read(&clicks.item)?);
        let is_right = logits.gt(0).eq_tensor(&clicks.labels.gt(0));
        Ok(f64::try_from(is_right.to_kind(Kind::Float).mean(Kind::Float))?)
    }
}

fn main() -> Result<()> {
    tch::manual_seed(1);
    let variables = nn::VarStore::new(Device::Cpu);
    let model = Model::new(&variables.root())?;
    let mut layers = nn::Adam::default().build(&variables, 0.005)?;
    for step in 0..=STEPS {
        let loss = model.train(&draw_clicks(), &mut layers)?;
        if step % 100 == 0 {
            let rows = model.user.handle().statistics()?.rows + model.item.handle().statistics()?.rows;
            println!("step {step:3}   log loss {loss:.4}   rows {rows:5}");
        }
    }
    let accuracy = model.accuracy(&draw_clicks())?;
    println!("{:.1} % of new labels predicted right; on average 95 % is the most there is", 100.0 * accuracy);
    assert!(accuracy > 0.85, "the model has learnt which kinds go together");
    Ok(())
}
