//! The graph of a program: operator calls in JSON, as `recstore_ops.serving.graph` writes it.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::program::{Argument, Call, Kind};

/// A graph that was read.
pub(crate) struct Graph {
    /// The names of the tensors that it needs.
    pub(crate) state: Vec<String>,
    pub(crate) inputs: usize,
    pub(crate) calls: Vec<Call>,
    pub(crate) outputs: Vec<Argument>,
}

/// The file; how its inputs and outputs lie in containers of Python is not read.
#[derive(Deserialize)]
struct Written {
    state: Vec<String>,
    inputs: usize,
    calls: Vec<(String, Vec<Value>, Map<String, Value>)>,
    outputs: Value,
}

/// Returns the graph of a text, or what is wrong with it.
pub(crate) fn parse(text: &[u8]) -> Result<Graph, String> {
    let written: Written = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let mut known = written.state.len() + written.inputs;
    let mut calls = Vec::with_capacity(written.calls.len());
    for (name, args, kwargs) in &written.calls {
        calls.push(call(name, args, kwargs, known)?);
        known += 1;
    }
    if !written.outputs.is_array() {
        return Err("its outputs are no list".to_owned());
    }
    let mut outputs = Vec::new();
    add(&mut outputs, &written.outputs, known)?;
    Ok(Graph { state: written.state, inputs: written.inputs, calls, outputs })
}

fn call(name: &str, args: &[Value], kwargs: &Map<String, Value>, known: usize) -> Result<Call, String> {
    let mut arguments = Vec::new();
    for value in args.iter().chain(kwargs.values()) {
        add(&mut arguments, value, known)?;
    }
    let (name, overload) = match name.rsplit_once('.') {
        // Of Python on sizes; these have no overloads.
        _ if !name.contains("::") => (name, ""),
        Some((name, overload)) => (name, if overload == "default" { "" } else { overload }),
        None => return Err(format!("{name} names no overload")),
    };
    let keys = kwargs.keys().cloned().collect();
    Ok(Call { name: name.to_owned(), overload: overload.to_owned(), positional: args.len(), keys, arguments })
}

/// Adds an argument; the elements of a list follow it.
fn add(arguments: &mut Vec<Argument>, value: &Value, known: usize) -> Result<(), String> {
    let plain = |kind| Argument { kind, number: 0, real: 0.0, text: String::new() };
    let numbered = |kind, number| Argument { number, ..plain(kind) };
    arguments.push(match value {
        Value::Null => plain(Kind::Nothing),
        Value::Bool(given) => numbered(Kind::Bool, i64::from(*given)),
        Value::Number(given) => match given.as_i64() {
            Some(number) => numbered(Kind::Int, number),
            None => return Err(format!("{given} is no argument of a call")),
        },
        Value::String(text) => Argument { text: text.clone(), ..plain(Kind::Text) },
        Value::Array(elements) => {
            arguments.push(numbered(Kind::List, elements.len() as i64));
            return elements.iter().try_for_each(|element| add(arguments, element, known));
        }
        Value::Object(fields) => tagged(fields, known)?,
    });
    Ok(())
}

/// An argument that JSON has no words for: an object with one field, which says its kind.
fn tagged(fields: &Map<String, Value>, known: usize) -> Result<Argument, String> {
    let unknown = || format!("{} is no argument of a call", Value::Object(fields.clone()));
    let mut each = fields.iter();
    let (Some((kind, value)), None) = (each.next(), each.next()) else { return Err(unknown()) };
    let argument = |kind, text: &str| Argument { kind, number: 0, real: 0.0, text: text.to_owned() };
    match (kind.as_str(), value.as_u64(), value.as_str()) {
        ("value", Some(number), _) if (number as usize) < known => {
            Ok(Argument { number: number as i64, ..argument(Kind::Value, "") })
        }
        ("value", Some(number), _) => {
            Err(format!("a call reads value {number}, there are {known} before it"))
        }
        ("float", _, Some(text)) => {
            Ok(Argument { real: text.parse().map_err(|_| unknown())?, ..argument(Kind::Float, "") })
        }
        ("dtype", _, Some(text)) => Ok(argument(Kind::DType, text)),
        ("device", _, Some(text)) => Ok(argument(Kind::Device, text)),
        ("layout", _, Some(text)) => Ok(argument(Kind::Layout, text)),
        ("memory_format", _, Some(text)) => Ok(argument(Kind::MemoryFormat, text)),
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(calls: &str) -> String {
        let text = format!(r#"{{"state": [], "inputs": 1, "calls": {calls}, "outputs": []}}"#);
        parse(text.as_bytes()).err().unwrap()
    }

    #[test]
    fn arguments_are_read_in_their_order() {
        let calls = r#"[["aten::add.Tensor", [{"value": 0}, [1, true]], {"alpha": {"float": "inf"}}]]"#;
        let text =
            format!(r#"{{"state": ["a"], "inputs": 0, "calls": {calls}, "outputs": [{{"value": 1}}]}}"#);
        let graph = parse(text.as_bytes()).unwrap();
        let call = &graph.calls[0];
        assert_eq!((call.name.as_str(), call.overload.as_str(), call.positional), ("aten::add", "Tensor", 2));
        let kinds: Vec<_> = call.arguments.iter().map(|argument| argument.kind).collect();
        assert_eq!(kinds, [Kind::Value, Kind::List, Kind::Int, Kind::Bool, Kind::Float]);
        assert_eq!(call.arguments[4].real, f64::INFINITY);
        assert_eq!((graph.outputs.len(), graph.outputs[1].number), (2, 1));
    }

    #[test]
    fn what_is_no_graph_is_refused() {
        assert_eq!(
            error(r#"[["a::b.c", [{"value": 1}], {}]]"#),
            "a call reads value 1, there are 1 before it"
        );
        assert_eq!(error(r#"[["a::b", [], {}]]"#), "a::b names no overload");
        for value in [r#"{"value": -1}"#, r#"{"float": "x"}"#, r#"{"a": 1, "b": 2}"#, "{}", "1.5"] {
            assert!(error(&format!(r#"[["a::b.c", [{value}], {{}}]]"#)).contains("is no argument of a call"));
        }
    }
}
