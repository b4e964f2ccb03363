//! The graph of a program: operator calls in JSON, as `recstore_ops.serving.graph` writes it.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::operators::Operators;
use crate::program::{Argument, Call, Kind};

/// A graph that was read.
pub(crate) struct Graph {
    /// The names of the tensors that it needs.
    pub(crate) state: Vec<String>,
    pub(crate) calls: Vec<Call>,
    /// The numbers of the values that it gives.
    pub(crate) outputs: Vec<usize>,
}

/// The file. How its inputs and outputs lie in containers of Python does not matter here.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    state: Vec<String>,
    inputs: usize,
    calls: Vec<(String, Vec<Value>, Map<String, Value>)>,
    outputs: Vec<Reference>,
    #[serde(rename = "in_spec")]
    _in_spec: String,
    #[serde(rename = "out_spec")]
    _out_spec: String,
}

/// `{"value": n}`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    value: usize,
}

/// Returns the graph of a text over so many inputs and outputs, or what is wrong with it.
pub(crate) fn parse(
    text: &[u8],
    inputs: usize,
    outputs: usize,
    operators: &Operators,
) -> Result<Graph, String> {
    let written: Written = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    for (found, expected, verb) in
        [(written.inputs, inputs, "takes"), (written.outputs.len(), outputs, "gives")]
    {
        if found != expected {
            return Err(format!("it {verb} {found} tensors, its manifest says {expected}"));
        }
    }
    let mut known = written.state.len() + inputs;
    let mut calls = Vec::with_capacity(written.calls.len());
    for (name, args, kwargs) in &written.calls {
        let reader = Reader { known, operators };
        calls.push(reader.call(name, args, kwargs).map_err(|reason| format!("{name}: {reason}"))?);
        known += 1;
    }
    let outputs: Vec<_> = written.outputs.iter().map(|output| output.value).collect();
    match outputs.iter().find(|&&value| value >= known) {
        Some(value) => Err(format!("it gives value {value}, there are {known}")),
        None => Ok(Graph { state: written.state, calls, outputs }),
    }
}

/// Reads a call.
struct Reader<'a> {
    /// How many values there are before it.
    known: usize,
    operators: &'a Operators,
}

impl Reader<'_> {
    fn call(&self, name: &str, args: &[Value], kwargs: &Map<String, Value>) -> Result<Call, String> {
        let schema = self.operators.schema(name);
        let schema = schema.ok_or("graphs may not call it, unless who opens the bundle allows its name")?;
        let mut arguments = Vec::new();
        for value in args.iter().chain(kwargs.values()) {
            self.add(&mut arguments, value)?;
        }
        let (name, overload) = match name.rsplit_once('.') {
            Some((name, overload)) if name.contains("::") => (name, overload),
            // Of Python on sizes; these have no overloads.
            _ => (name, ""),
        };
        Ok(Call {
            name: name.to_owned(),
            overload: if overload == "default" { "" } else { overload }.to_owned(),
            schema: schema.to_owned(),
            positional: args.len(),
            keys: kwargs.keys().cloned().collect(),
            arguments,
        })
    }

    /// Adds an argument; the elements of a list follow it. No schema of an operator has lists of lists.
    fn add(&self, arguments: &mut Vec<Argument>, value: &Value) -> Result<(), String> {
        let Value::Array(elements) = value else {
            arguments.push(self.single(value)?);
            return Ok(());
        };
        arguments.push(of_number(Kind::List, elements.len() as i64));
        for element in elements {
            arguments.push(self.single(element)?);
        }
        Ok(())
    }

    fn single(&self, value: &Value) -> Result<Argument, String> {
        let unknown = || format!("{} is no argument of a call", shortened(value));
        match value {
            Value::Null => Ok(of_number(Kind::Nothing, 0)),
            Value::Bool(given) => Ok(of_number(Kind::Bool, i64::from(*given))),
            Value::Number(given) => {
                given.as_i64().map(|number| of_number(Kind::Int, number)).ok_or_else(unknown)
            }
            Value::String(text) => Ok(of_text(Kind::Text, text)),
            Value::Object(fields) if fields.len() == 1 => self.tagged(fields)?.ok_or_else(unknown),
            Value::Object(_) | Value::Array(_) => Err(unknown()),
        }
    }

    /// An argument that JSON has no words for: an object with one field, which says its kind.
    fn tagged(&self, fields: &Map<String, Value>) -> Result<Option<Argument>, String> {
        let Some((kind, value)) = fields.iter().next() else { return Ok(None) };
        if kind == "value" {
            return value.as_u64().map(|number| self.reference(number)).transpose();
        }
        let Some(text) = value.as_str() else { return Ok(None) };
        Ok(match kind.as_str() {
            "float" => text.parse().ok().map(|real| Argument { real, ..of_number(Kind::Float, 0) }),
            "dtype" => Some(of_text(Kind::DType, text)),
            "device" => Some(of_text(Kind::Device, text)),
            "layout" => Some(of_text(Kind::Layout, text)),
            "memory_format" => Some(of_text(Kind::MemoryFormat, text)),
            _ => None,
        })
    }

    fn reference(&self, number: u64) -> Result<Argument, String> {
        if number >= self.known as u64 {
            return Err(format!("a call reads value {number}, there are {} before it", self.known));
        }
        Ok(of_number(Kind::Value, number as i64))
    }
}

fn of_number(kind: Kind, number: i64) -> Argument {
    Argument { kind, number, real: 0.0, text: String::new() }
}

fn of_text(kind: Kind, text: &str) -> Argument {
    Argument { kind, number: 0, real: 0.0, text: text.to_owned() }
}

/// A value as a message has it.
fn shortened(value: &Value) -> String {
    const MAX: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed() -> Operators {
        Operators::with(&["a::b.c"]).unwrap()
    }

    fn text(calls: &str, outputs: &str) -> String {
        format!(
            r#"{{"state": [], "inputs": 1, "calls": {calls}, "outputs": {outputs}, "in_spec": "", "out_spec": ""}}"#
        )
    }

    fn error(calls: &str) -> String {
        parse(text(calls, "[]").as_bytes(), 1, 0, &allowed()).err().unwrap()
    }

    #[test]
    fn arguments_are_read_in_their_order() {
        let calls = r#"[["aten::add.Tensor", [{"value": 0}, [1, true]], {"alpha": {"float": "inf"}}]]"#;
        let graph = parse(text(calls, r#"[{"value": 1}]"#).as_bytes(), 1, 1, &allowed()).unwrap();
        let call = &graph.calls[0];
        assert_eq!((call.name.as_str(), call.overload.as_str(), call.positional), ("aten::add", "Tensor", 2));
        assert!(call.schema.starts_with("aten::add.Tensor(Tensor self"));
        let kinds: Vec<_> = call.arguments.iter().map(|argument| argument.kind).collect();
        assert_eq!(kinds, [Kind::Value, Kind::List, Kind::Int, Kind::Bool, Kind::Float]);
        assert_eq!(call.arguments[4].real, f64::INFINITY);
        assert_eq!(graph.outputs, [1]);
    }

    #[test]
    fn what_is_no_graph_is_refused() {
        let reads = "a::b.c: a call reads value 1, there are 1 before it";
        assert_eq!(error(r#"[["a::b.c", [{"value": 1}], {}]]"#), reads);
        for value in [
            r#"{"value": -1}"#,
            r#"{"value": true}"#,
            r#"{"float": "x"}"#,
            r#"{"float": 1}"#,
            r#"{"a": 1, "b": 2}"#,
            r#"{"code": "x"}"#,
            "{}",
            "1.5",
            "9223372036854775808",
            "[[1]]",
        ] {
            let told = error(&format!(r#"[["a::b.c", [{value}], {{}}]]"#));
            assert!(told.contains("is no argument of a call"), "{told}");
        }
    }

    #[test]
    fn operators_outside_the_list_are_refused_by_name() {
        for name in ["aten::from_file.default", "a::b", "operator.pow", "", "__import__", "a::b.c.d"] {
            let told = error(&format!(r#"[["{name}", [], {{}}]]"#));
            assert!(told.starts_with(&format!("{name}: graphs may not call it")), "{told}");
        }
    }

    #[test]
    fn a_text_of_another_form_is_refused() {
        let refused = |text: &str| parse(text.as_bytes(), 1, 0, &allowed()).err().unwrap();
        let whole = text("[]", "[]");
        for (from, to, told) in [
            (r#""inputs": 1"#, r#""inputs": 2"#, "it takes 2 tensors, its manifest says 1"),
            (r#""outputs": []"#, r#""outputs": [{"value": 0}]"#, "it gives 1 tensors, its manifest says 0"),
            (r#""outputs": []"#, r#""outputs": [7]"#, "invalid type"),
            (r#""state": []"#, r#""state": [1]"#, "invalid type"),
            (r#""state": []"#, r#""states": []"#, "unknown field"),
            (r#""calls": []"#, r#""calls": [["a::b.c", []]]"#, "invalid length"),
            (r#", "in_spec": """#, "", "missing field"),
        ] {
            let found = refused(&whole.replace(from, to));
            assert!(found.contains(told), "{found}");
        }
        let deep = format!(r#"[["aten::relu", {}"#, "[".repeat(100_000));
        assert!(refused(&text(&deep, "[]")).contains("recursion limit"));
        let beyond = parse(text("[]", r#"[{"value": 1}]"#).as_bytes(), 1, 1, &allowed()).err().unwrap();
        assert_eq!(beyond, "it gives value 1, there are 1");
    }
}
