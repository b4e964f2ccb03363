//! Floats as bfloat16 on the wire: half the bytes, rounded to the nearest, ties to even. That is off by 2^-9 of a value at
//! most, but for those below the smallest normal float, and those that would become infinite.

use super::frame::{Frame, Received};
use super::frame_error::FrameError;
use super::section::Section;

/// The bits of a float that a bfloat16 lacks.
const LOST_BITS: u32 = 16;

/// The bits of a bfloat16 but for its sign.
const SIGNLESS: u16 = 0x7FFF;

/// The bits of the largest bfloat16 that is finite.
const LARGEST: u16 = 0x7F7F;

/// Returns the bfloat16 that is nearest to a value: a finite one to a finite one, so that no server refuses what the client
/// found good.
pub(super) fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    let upper = (bits >> LOST_BITS) as u16;
    let half = (1 << (LOST_BITS - 1)) - 1;
    let rounded = (bits.wrapping_add(half + u32::from(upper & 1)) >> LOST_BITS) as u16;
    match value {
        // The lost bits of a NaN may be all that tell it from infinity.
        _ if value.is_nan() => upper | 1,
        _ if value.is_infinite() => upper,
        _ => upper & !SIGNLESS | (rounded & SIGNLESS).min(LARGEST),
    }
}

/// Returns the value of a bfloat16.
pub(super) fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << LOST_BITS)
}

impl Frame<'_> {
    /// Calls `send` with the frame, its floats as bfloat16.
    pub(crate) fn narrowed<R>(&self, send: impl FnOnce(&Frame<'_>) -> R) -> R {
        let narrow = |section: &Section<'_>| match section {
            Section::F32(values) => values.iter().map(|&value| narrow(value)).collect(),
            _ => Vec::new(),
        };
        let narrow: Vec<Vec<u16>> = self.sections.iter().map(narrow).collect();
        let section = |(section, narrow)| match section {
            Section::F32(_) => Section::Bf16(narrow),
            other => other,
        };
        let sections = self.sections.iter().copied().zip(narrow.iter().map(Vec::as_slice)).map(section);
        send(&Frame { header: self.header, sections: sections.collect() })
    }
}

impl Received {
    /// Returns the frame with float32 in the place of bfloat16.
    ///
    /// # Errors
    /// As [`Received::sections`].
    pub(crate) fn widened(self) -> Result<Self, FrameError> {
        let sections = self.sections()?;
        if !sections.iter().any(|section| matches!(section, Section::Bf16(_))) {
            return Ok(self);
        }
        let wide = |section: &Section<'_>| match section {
            Section::Bf16(values) => values.iter().map(|&bits| widen(bits)).collect(),
            _ => Vec::new(),
        };
        let wide: Vec<Vec<f32>> = sections.iter().map(wide).collect();
        let mut body = Vec::new();
        for (section, wide) in sections.iter().zip(&wide) {
            let section = if matches!(section, Section::Bf16(_)) { Section::F32(wide) } else { *section };
            section.write(&mut body)?;
        }
        Ok(self.with_body(&body))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::super::frame::{Header, Kind, decode};
    use super::*;

    #[test]
    fn every_bfloat16_comes_back() {
        for bits in 0..=u16::MAX {
            let value = widen(bits);
            let expected = bf16::from_bits(bits).to_f32();
            assert!(
                value.is_nan() && expected.is_nan() || value.to_bits() == expected.to_bits(),
                "{bits:#x}"
            );
            assert!(value.is_nan() && widen(narrow(value)).is_nan() || narrow(value) == bits, "{bits:#x}");
        }
    }

    proptest! {
        #[test]
        fn values_are_rounded_to_the_nearest(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            let (own, expected) = (widen(narrow(value)), bf16::from_f32(value).to_f32());
            let expected = match value.is_finite() && expected.is_infinite() {
                true => bf16::MAX.to_f32().copysign(value),
                false => expected,
            };
            prop_assert!(own.is_nan() && expected.is_nan() || own.to_bits() == expected.to_bits(), "{value}");
        }
    }

    #[test]
    fn the_largest_values_stay_finite() {
        for value in [f32::MAX, -f32::MAX] {
            assert_eq!(widen(narrow(value)), bf16::MAX.to_f32().copysign(value));
        }
    }

    #[test]
    fn a_frame_is_narrow_on_its_way_only() {
        let (ids, rows, none) = ([1, -2, 3], [1.5, -0.0, 0.1, f32::INFINITY, f32::NAN], []);
        let sections =
            vec![Section::I64(&ids), Section::F32(&rows), Section::F32(&none), Section::Json("{}")];
        let frame = Frame { header: Header::new(Kind::Update, 7), sections };
        let bytes = frame.narrowed(|frame| frame.to_bytes().unwrap());
        let narrow = decode(&bytes, 1 << 20).unwrap();
        assert!(matches!(
            narrow.sections().unwrap()[..],
            [Section::I64(_), Section::Bf16(_), Section::Bf16(&[]), Section::Json(_)]
        ));
        let len = narrow.bytes();
        let wide = narrow.widened().unwrap();
        let [Section::I64(own_ids), Section::F32(own), Section::F32(&[]), Section::Json("{}")] =
            wide.sections().unwrap()[..]
        else {
            panic!("{:?}", wide.sections());
        };
        assert_eq!((own_ids, wide.bytes(), wide.header), (&ids[..], len, frame.header));
        assert_eq!(
            own[..4].iter().map(|value| value.to_bits()).collect::<Vec<_>>(),
            [1.5, -0.0, 0.100_097_656, f32::INFINITY].map(f32::to_bits)
        );
        assert!(own[4].is_nan());
    }
}
