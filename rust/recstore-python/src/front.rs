//! The ports of `recstore serve-model`: what comes to them, and answers.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use recstore_ps::front::{Answer, Arrival, Event, FrontConfig, Kind};

use crate::servers::{TlsFiles, seconds};

/// Ports of a model, whose requests and answers go through `take` and `answer`.
#[pyclass(frozen)]
pub(crate) struct Front(recstore_ps::front::Front);

type NextRequest<'py> = (u64, Option<RequestTuple<'py>>);
type RequestTuple<'py> =
    (&'static str, String, String, Bound<'py, PyDict>, Bound<'py, PyBytes>, Option<(&'static str, String)>);

#[pymethods]
impl Front {
    /// Prepares ports; none is open yet.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    #[pyo3(signature = (*, max_connections, max_body, max_pending_bytes, token, tls, handshake_timeout, idle_timeout, transfer_timeout))]
    fn new(
        max_connections: usize,
        max_body: usize,
        max_pending_bytes: usize,
        token: Option<String>,
        tls: Option<TlsFiles>,
        handshake_timeout: f64,
        idle_timeout: f64,
        transfer_timeout: f64,
    ) -> PyResult<Self> {
        let tls = tls.map(|tls| tls.of_server()).transpose()?;
        let [handshake_timeout, idle_timeout, transfer_timeout] =
            [handshake_timeout, idle_timeout, transfer_timeout].map(seconds);
        let config = FrontConfig {
            max_connections,
            max_body,
            max_pending_bytes,
            token,
            tls,
            handshake_timeout: handshake_timeout?,
            idle_timeout: idle_timeout?,
            transfer_timeout: transfer_timeout?,
        };
        Ok(Self(recstore_ps::front::Front::new(config)?))
    }

    /// Opens a port (`http`, `grpc`, `health` or `metrics`) at an address, and returns its number.
    fn listen(&self, kind: &str, address: &str, port: u16) -> PyResult<u16> {
        let unknown = || PyValueError::new_err(format!("there is no kind of port \"{kind}\""));
        let kind = Kind::named(kind).ok_or_else(unknown)?;
        let host: IpAddr =
            address.parse().map_err(|_| PyValueError::new_err(format!("\"{address}\" is no address")))?;
        Ok(self.0.listen(kind, SocketAddr::new(host, port))?.port())
    }

    /// A descriptor that can be read while there is something to take.
    fn fileno(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }

    /// Takes the requests that have come: their numbers, and port, method, path, headers, body, and why that is missing.
    /// A number alone is that of a request whose client has gone.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Vec<NextRequest<'py>>> {
        self.0.take().into_iter().map(|event| taken(py, event)).collect()
    }

    /// Answers a request.
    fn answer(&self, number: u64, status: u16, headers: Vec<(String, String)>, body: &[u8]) {
        self.0.answer(number, Answer { status, headers, body: body.to_vec() });
    }

    /// Says whether health is to say ready.
    fn set_ready(&self, is_ready: bool) {
        self.0.set_ready(is_ready);
    }

    /// Returns for each port its open connections, and the peers that were refused by reason.
    #[expect(clippy::type_complexity, reason = "tuples in Python")]
    fn counts(&self) -> Vec<(&'static str, u64, Vec<(&'static str, u64)>)> {
        self.0.counts().into_iter().map(|each| (each.port, each.open, each.refused)).collect()
    }

    /// Takes nothing more, and gives answers so many seconds to be accepted.
    fn stop(&self, py: Python<'_>, grace: f64) -> PyResult<()> {
        let grace: Duration = seconds(grace)?;
        py.detach(|| self.0.stop(grace));
        Ok(())
    }
}

fn taken(py: Python<'_>, event: Event) -> PyResult<NextRequest<'_>> {
    let (number, asked) = match event {
        Event::Gone(number) => return Ok((number, None)),
        Event::Arrival(number, asked) => (number, asked),
    };
    let Arrival { port, method, path, headers, body, failure } = asked;
    let told = PyDict::new(py);
    for (name, value) in headers {
        told.set_item(name, PyBytes::new(py, &value))?;
    }
    Ok((number, Some((port, method, path, told, PyBytes::new(py, &body), failure))))
}

/// Raises the limit of descriptors of this process as far as it may be, and returns the one before and the one from now on.
#[pyfunction]
pub(crate) fn raise_descriptor_limit() -> (u64, u64) {
    recstore_ps::raise_descriptor_limit()
}
