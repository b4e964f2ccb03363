//! The optimizers of the store, as configurations that tests go through: a new one is among them.

use recstore::optimizers;
use serde_json::Value;

/// Returns the optimizer of each form of each rule, as JSON, with the learning rate that `rate` gives it.
pub(crate) fn forms_at(rate: impl Fn(&Value, &Value) -> f64) -> Vec<String> {
    let of = |rule: Value| {
        let with_rate = |form: &Value| {
            let mut form = form.clone();
            form[rule["options"][0]["name"].as_str().unwrap()] = rate(&rule, &form).into();
            form.to_string()
        };
        rule["forms"].as_array().unwrap().iter().map(with_rate).collect::<Vec<_>>()
    };
    optimizers().into_iter().flat_map(of).collect()
}
